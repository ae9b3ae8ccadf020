"""Errors of the engine. Each refines the nearest builtin and carries the numbers it speaks of as fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StreamflowError(Exception):
    """Base of every error that streamflow raises on its own account.

    ``request_id`` is that of the request it was raised from; None where there is none.
    """

    request_id: str | None = None


class EngineBrokenError(StreamflowError, RuntimeError):
    """The engine failed earlier and serves no more; ``__cause__`` is the failure."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        super().__init__(
            f"the offload is broken by an earlier failure ({type(cause).__name__}: {cause}); "
            "close it and open a new one"
        )


class EngineClosedError(StreamflowError, RuntimeError):
    """The engine was closed, or is closing, by its owner."""

    def __init__(self, what: str = "the offload") -> None:
        super().__init__(f"{what} is closed or closing; open a new one")


class StaleSlotError(StreamflowError, RuntimeError):
    """A block was about to run from a slot that holds another generation: an engine bug, caught before it computes."""

    def __init__(self, block: int, slot: int, expected: int, found: int) -> None:
        self.block, self.slot, self.expected, self.found = block, slot, expected, found
        super().__init__(
            f"block {block} was told to use slot {slot} at generation {expected}, but the slot is at {found}; "
            "please report this as a bug"
        )


class NestedBlockError(StreamflowError, RuntimeError):
    """A block was entered while its pass was inside another: the outer one's weights could be replaced under it."""

    def __init__(self, block: int, inside: int) -> None:
        self.block, self.inside = block, inside
        super().__init__(
            f"block {block} was entered inside block {inside}, but blocks run one after the other; "
            "stream the outer one only"
        )


class SourceReadError(StreamflowError, OSError):
    """A block's bytes could not be read from their source."""

    def __init__(self, source: str, offset: int, wanted: int, got: int, reason: str) -> None:
        self.source, self.offset, self.wanted, self.got, self.reason = source, offset, wanted, got, reason
        super().__init__(
            f"{source}: {got} of {wanted} bytes at offset {offset} could be read ({reason}); "
            "the file must stay as it is while it is open"
        )


class DeviceMemoryError(StreamflowError, MemoryError):
    """A device buffer does not fit."""

    def __init__(self, device: str, wanted: int, in_use: int, limit: int | None) -> None:
        self.device, self.wanted, self.in_use, self.limit = device, wanted, in_use, limit
        cap = "unknown" if limit is None else f"{limit:,}"
        super().__init__(
            f"{device}: {wanted:,} bytes do not fit beside the {in_use:,} in use (limit {cap}); "
            "use fewer window_blocks or fewer resident blocks"
        )


class NestedComponentError(StreamflowError, RuntimeError):
    """A component was called inside another and there is no room for both; to wait for some could be for ever."""

    def __init__(self, component: str, nbytes: int, used: int, budget: int | None) -> None:
        self.component, self.nbytes, self.used, self.budget = component, nbytes, used, budget
        super().__init__(
            f"{component} ({nbytes:,} bytes) was called inside another component, and does not fit beside what is in "
            f"use ({used:,} bytes of a budget of {budget or 0:,}); raise device_budget_bytes or call them in turn"
        )


class DeviceStreamError(StreamflowError, RuntimeError):
    """Work queued on a device stream failed, or on one that it waited for; ``cause`` is the first failure."""

    def __init__(self, stream: str, cause: BaseException) -> None:
        self.stream = stream
        self.cause: BaseException = cause.cause if isinstance(cause, DeviceStreamError) else cause
        super().__init__(f"work on the device stream {stream!r} failed: {type(cause).__name__}: {cause}")


class HostRegistrationError(StreamflowError, RuntimeError):
    """Host memory cannot be page-locked for the device, or not be given back.

    ``call`` is what was refused or failed, ``nbytes`` are the bytes that it was about.
    """

    def __init__(self, call: str, nbytes: int, reason: str) -> None:
        self.call, self.nbytes, self.reason = call, nbytes, reason
        super().__init__(f"{call} of {nbytes:,} bytes {reason}")


class StillRegisteredError(StreamflowError, RuntimeError):
    """Registered host memory could not be given back: it stays mapped, with its source, until it can be.

    ``failures`` has one error for each range. ``retry()`` tries again to give everything back: it blocks, and raises
    such an error if that fails, too. Memory that is never given back goes with the process.
    """

    def __init__(self, what: str, failures: Sequence[HostRegistrationError], retry: Callable[[], None]) -> None:
        self.what, self.failures, self.retry = what, tuple(failures), retry
        nbytes = sum(failure.nbytes for failure in failures)
        super().__init__(
            f"{nbytes:,} bytes of {what} stay page-locked, and mapped, because the device would not give them back "
            f"({failures[0]}); call this error's retry() to try again, or end the process"
        )


class NotPageLockedError(StreamflowError, BufferError):
    """A direct transfer was given an image that the device cannot read where it lies; ``image`` is its name."""

    def __init__(self, image: str) -> None:
        self.image = image
        super().__init__(
            f"{image} is not page-locked, so the device cannot copy it without a host pass; "
            "register its memory first, or use the staged transfer"
        )


class StopForward(BaseException):
    """Ends a forward at the next block boundary because its request was cancelled or its offload closed.

    Derived from BaseException, so that a pipeline's ``except Exception`` cannot swallow it.
    """
