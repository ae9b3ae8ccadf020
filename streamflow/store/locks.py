"""File locks: taken without waiting in the system, waited for by the loop, given back with the descriptor."""

from __future__ import annotations

import fcntl
import os

import anyio

from streamflow.store.descriptors import Descriptor
from streamflow.store.errors import LockFailedError, LockTimeoutError
from streamflow.store.files import FileOperations

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


def try_lock(files: FileOperations, descriptor: Descriptor, *, exclusive: bool) -> bool:
    """Whether the lock could be had at once. It lasts until the descriptor is closed, or the process dies.

    :raises LockFailedError: if the filesystem has no locks.
    """
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        files.flock(descriptor.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as failure:
        raise LockFailedError(descriptor.path, failure.strerror or str(failure)) from failure
    return True


class Patience:
    """How long a lock may still be waited for. Counts on the loop's clock, from when it is made.

    ``what`` says what the lock is for and ``option`` which option bounds the wait, for the error.
    """

    def __init__(self, what: str, wait_s: float, option: str) -> None:
        self._what, self._wait_s, self._option = what, wait_s, option
        self._deadline = anyio.current_time() + wait_s
        self._pause_s = _FIRST_PAUSE_S

    async def pause(self, path: str) -> None:
        """Wait a moment; each is longer than the last.

        :raises LockTimeoutError: if the time is over.
        """
        left = self._deadline - anyio.current_time()
        if left <= 0:
            raise LockTimeoutError(self._what, path, self._wait_s, self._option)
        await anyio.sleep(min(self._pause_s, left))
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)


async def wait_for_lock(files: FileOperations, descriptor: Descriptor, patience: Patience) -> None:
    """Take the lock for this process alone. Asking does not block: the loop stays free, and can cancel at any time.

    :raises LockTimeoutError: if others hold it for too long.
    :raises LockFailedError: if the filesystem has no locks.
    """
    while not try_lock(files, descriptor, exclusive=True):
        await patience.pause(descriptor.path)


def still_names(path: str, descriptor: Descriptor) -> bool:
    """Whether ``path`` is still the name of what was opened; what was locked may have been moved or removed."""
    opened = os.fstat(descriptor.fileno())
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
