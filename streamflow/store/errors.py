"""Errors of the host weight store: each has a code, refines the nearest builtin and carries what it speaks of."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from streamflow.stages.errors import StreamflowError
from streamflow.store.codes import StoreCode
from streamflow.store.reports import StoreReport

#: Failures that another attempt may not meet, with nothing changed but time; the others are somebody's mistake.
RETRYABLE = frozenset(
    {
        StoreCode.LOCK_TIMEOUT,
        StoreCode.LOCK_FAILED,
        StoreCode.INSUFFICIENT_DISK,
        StoreCode.ENTRY_REJECTED,
        StoreCode.OPERATION_FAILED,
    }
)


class StoreError(StreamflowError):
    """Base of the store's errors; ``code`` says which kind, ``is_retryable`` whether another attempt may succeed.

    ``report`` is that of the opening that it ended; None elsewhere.
    """

    report: StoreReport | None = None

    def __init__(self, code: StoreCode, message: str, *, is_retryable: bool | None = None) -> None:
        self.code = code
        self.is_retryable = code in RETRYABLE if is_retryable is None else is_retryable
        super().__init__(message)


class StoreOptionsError(StoreError, ValueError):
    """Options of the store that are wrong; ``problems`` has all of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        listed = "".join(f"\n- {text}" for text in problems)
        super().__init__(StoreCode.INVALID_CONFIGURATION, f"the options of the store are not usable:{listed}")


class InvalidIdentityError(StoreError, ValueError):
    """A name that was given as an identity could not be a file name of the store."""

    def __init__(self, what: str, value: str, rule: str) -> None:
        self.what, self.value = what, value
        super().__init__(StoreCode.INVALID_CONFIGURATION, f"{value!r} is no {what}: {rule}")


class RootRefusedError(StoreError, PermissionError):
    """The store's folder could be changed by somebody who is not trusted with weights, or is no folder."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(
            StoreCode.INVALID_CONFIGURATION,
            f"{path}: {reason}; what is stored there becomes weights: change its owner or mode, choose another root, "
            "or allow the sharing by dir_mode",
        )


class StoreFormatError(StoreError, ValueError):
    """The folder holds a store of another format."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(StoreCode.INVALID_CONFIGURATION, f"{path}: {reason}; give the store another root")


class UnsupportedFilesystemError(StoreError, OSError):
    """The store's folder is on a filesystem whose locks or mappings cannot be relied on."""

    def __init__(self, path: str, filesystem: str, reason: str) -> None:
        self.path, self.filesystem, self.reason = path, filesystem, reason
        super().__init__(
            StoreCode.UNSUPPORTED_FILESYSTEM,
            f"{path} is on {filesystem}: {reason}; choose a root on a local disk",
        )


class LockFailedError(StoreError, OSError):
    """A lock could be neither had nor waited for."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(StoreCode.LOCK_FAILED, f"{path} cannot be locked ({reason})")


class LockTimeoutError(StoreError, TimeoutError):
    """A lock was held by others for longer than this process is allowed to wait."""

    def __init__(self, what: str, path: str, waited_s: float, option: str) -> None:
        self.what, self.path, self.waited_s, self.option = what, path, waited_s, option
        super().__init__(
            StoreCode.LOCK_TIMEOUT,
            f"{what}: another process or task has held {path} for the {waited_s:g} s that may be waited; "
            f"see what holds it (`lslocks`), or raise {option}",
        )


class InsufficientDiskError(StoreError, OSError):
    """The disk has not the room for an entry; sizes are in bytes, None where the system said only that it is full."""

    def __init__(self, path: str, wanted: int | None, available: int | None, headroom: int | None) -> None:
        self.path, self.wanted, self.available, self.headroom = path, wanted, available, headroom
        need = "the disk, or the quota, was full while an entry was written"
        if wanted is not None and available is not None:
            need = f"an entry needs {wanted:,} bytes, besides {headroom or 0:,} that stay free; {available:,} are free"
        super().__init__(
            StoreCode.INSUFFICIENT_DISK, f"{path}: {need}; make room (`streamflow store evict`) or choose another root"
        )


class StoreOperationError(StoreError, OSError):
    """The system refused an operation on the store's files; ``number`` is its errno."""

    def __init__(self, operation: str, path: str, failure: OSError) -> None:
        self.operation, self.path, self.number = operation, path, failure.errno
        super().__init__(StoreCode.OPERATION_FAILED, f"{operation} in {path} failed: {failure}")


class DraftError(StoreError, ValueError):
    """What is to be published contradicts itself."""

    def __init__(self, name: str, reason: str, code: StoreCode = StoreCode.INVALID_CONFIGURATION) -> None:
        self.name, self.reason = name, reason
        super().__init__(code, f"{name}: {reason}")


class UnsupportedTensorError(StoreError, TypeError):
    """A tensor has no form in which a stock safetensors reader would read its values."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(StoreCode.UNSUPPORTED_TENSOR, f"{name}: {reason}; load this model without the store")


class EntryGoneError(StoreError, LookupError):
    """An entry was taken away between its publication and its first use, although it was in use."""

    def __init__(self, content_id: str, generation: int) -> None:
        self.content_id, self.generation = content_id, generation
        super().__init__(
            StoreCode.OPERATION_FAILED,
            f"generation {generation} of {content_id} is gone right after it was published; something other than "
            "`streamflow store evict`, which leaves what is in use, removes files of the store",
        )


class EntryRejectedError(StoreError, ValueError):
    """A stored entry is damaged and will not be used again.

    ``disposition`` says what was done with it: ``quarantined`` (moved aside), ``denied`` (marked, where it could not be
    moved) or ``denied by this process`` (where it could not even be marked).
    """

    def __init__(self, content_id: str, generation: int, reason: str, disposition: str) -> None:
        self.content_id, self.generation = content_id, generation
        self.reason, self.disposition = reason, disposition
        super().__init__(
            StoreCode.ENTRY_REJECTED,
            f"generation {generation} of the stored entry {content_id} is damaged ({reason}); "
            f"it is {disposition} now, and publishing again rebuilds it",
        )


class IdentityCollisionError(StoreError, ValueError):
    """One source gave two different contents: its identity leaves out something that matters."""

    def __init__(self, source_id: str, known: str, found: str) -> None:
        self.source_id, self.known, self.found = source_id, known, found
        super().__init__(
            StoreCode.IDENTITY_COLLISION,
            f"the source {source_id} is stored with the content {known}, but has now given {found}; loading is not "
            "deterministic, or the ABI string of the producer was not changed with it",
        )


class ContentChangedError(StoreError, RuntimeError):
    """The tensors changed between being hashed and being written."""

    def __init__(self, expected: str, found: str) -> None:
        self.expected, self.found = expected, found
        super().__init__(
            StoreCode.OPERATION_FAILED,
            f"the content to publish was {expected} and is {found} now; leave the model alone while it is published",
            is_retryable=False,
        )


class SourceChangedError(StoreError, RuntimeError):
    """A source file changed, or was replaced, while it was opened and hashed."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            StoreCode.OPERATION_FAILED,
            f"{path} changed while it was opened and hashed; wait until it is written completely",
        )


class StoreClosedError(StoreError, RuntimeError):
    """The store was used after it was closed."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(StoreCode.OPERATION_FAILED, f"the store {path} is closed; open it again", is_retryable=False)


class StoreForkedError(StoreError, RuntimeError):
    """A store, lease or lock was used in a process that was forked after it was opened."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            StoreCode.OPERATION_FAILED,
            f"{path} was opened by the process that forked this one, which keeps its locks; "
            "open the store in this process",
            is_retryable=False,
        )


class LeaseClosedError(StoreError, ValueError):
    """A lease was used after it was closed."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            StoreCode.OPERATION_FAILED, f"the lease of {path} is closed; lease the entry again", is_retryable=False
        )


class LeaseInUseError(StoreError, BufferError):
    """A lease cannot be closed yet; it stays open and usable."""

    def __init__(self, path: str, user: str) -> None:
        self.path, self.user = path, user
        super().__init__(
            StoreCode.OPERATION_FAILED,
            f"the lease of {path} cannot be closed while {user}; end those first, then close it again",
            is_retryable=False,
        )


@contextmanager
def disk_errors(operation: str, path: str) -> Iterator[None]:
    """Lets no bare OSError out: what the system refuses becomes a typed error that says what was done and where."""
    try:
        yield
    except StreamflowError:
        raise
    except OSError as failure:
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InsufficientDiskError(path, None, None, None) from failure
        raise StoreOperationError(operation, path, failure) from failure
