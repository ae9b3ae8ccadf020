"""Every system call by which the store changes a disk or takes a lock, in one object that tests replace."""

from __future__ import annotations

import ctypes
import fcntl
import os

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class FileOperations:
    """The system's own operations. Paths are absolute; descriptors come from `open`; each method is one system call.

    A subclass may count, log, fail or stop at each of them. What only reads is not here.
    """

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """A new descriptor, which no child inherits; a symlink is refused (ELOOP)."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of ``data``; how many bytes."""
        return os.pwrite(fd, data, offset)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """Give the file this size and the disk space for it; it reads as zeros."""
        os.posix_fallocate(fd, 0, nbytes)

    def fsync(self, fd: int) -> None:
        """Bring a file, or the names in a folder, to the disk."""
        os.fsync(fd)

    def start_writeback(self, fd: int, offset: int, nbytes: int) -> None:
        """Ask for these bytes to go to the disk in the background; promises nothing, and cannot fail."""
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)

    def fchmod(self, fd: int, mode: int) -> None:
        """Set the permissions, whatever the umask is."""
        os.fchmod(fd, mode)

    def touch(self, fd: int) -> None:
        """Set the file's time of change to now."""
        os.utime(fd)

    def mkdir(self, path: str, mode: int) -> None:
        """Make a folder."""
        os.mkdir(path, mode)

    def rename(self, source: str, target: str) -> None:
        """Give a file or folder another name, in one step."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def flock(self, fd: int, operation: int) -> None:
        """Take a lock (``fcntl.LOCK_*``); it is given back when the last descriptor of this opening is closed."""
        fcntl.flock(fd, operation)

    def free_bytes(self, path: str) -> tuple[int, int]:
        """Bytes that may be written to the filesystem of ``path``, and the size of it."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
