"""Open files that know their owner's process: a forked child closes its copies and cannot use them.

A child shares its parent's locks. It must not release them, and must not keep them alive after the parent died; so it
closes the descriptors, which does neither, before any of its own code runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from streamflow.store.errors import StoreClosedError, StoreForkedError
from streamflow.store.files import FileOperations

#: Held from opening to registering, and while the process forks: no descriptor reaches a child unknown.
_opening = threading.RLock()
_open: dict[int, Descriptor] = {}


class Descriptor:
    """One open file or folder. Made by `open_descriptor` and `open_inside`; its owner closes it."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd
        self.is_forked = False

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """The number, valid until `close`.

        :raises StoreForkedError: if this process was forked from the one that opened it.
        :raises StoreClosedError: if it is closed.
        """
        fd = self._fd
        if fd is None:
            raise StoreForkedError(self.path) if self.is_forked else StoreClosedError(self.path)
        return fd

    def close(self) -> None:
        """Close. Idempotent; in a forked child nothing is left to do."""
        if _open.pop(id(self), None) is not None and self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def forget(self) -> None:
        """What a forked child does."""
        fd, self._fd, self.is_forked = self._fd, None, True
        if fd is not None:
            with suppress(OSError):
                os.close(fd)


def open_descriptor(files: FileOperations, path: str, flags: int, mode: int = 0) -> Descriptor:
    """The file at ``path``, open. ``mode`` is for a new one, before the umask.

    :raises OSError: if it cannot be opened, or is a symlink.
    """
    return _register(path, lambda: files.open(path, flags, mode))


def open_inside(folder: Descriptor, name: str, flags: int) -> Descriptor:
    """The file of this name in an open folder, whatever became of the folder's own name; for reading.

    :raises OSError: if it cannot be opened, or is a symlink.
    """
    # O_NONBLOCK: opening a named pipe would wait for a writer; regular files do not care
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return _register(os.path.join(folder.path, name), lambda: os.open(name, flags, dir_fd=folder.fileno()))


def num_open() -> int:
    """How many descriptors of the store are open in this process."""
    return len(_open)


def _register(path: str, open_it: Callable[[], int]) -> Descriptor:
    with _opening:
        descriptor = Descriptor(path, open_it())
        _open[id(descriptor)] = descriptor
        return descriptor


def _forget_all() -> None:
    for descriptor in list(_open.values()):
        descriptor.forget()
    _open.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget_all)
