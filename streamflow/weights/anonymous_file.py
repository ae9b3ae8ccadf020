"""A file in memory that has no name: shared by the processes that were told where to find it, gone with the last one.

1. One process makes it (`create`) and tells the others its `address`; they open it (`open_at`).
2. Each writes its own part (`writing`).
3. `seal`, in each once all have stopped writing: from then on nobody can change a byte, whoever still has it open.

The size is sealed from the start, so that memory mapped from it is there: reading it is never a signal. No torch.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from streamflow.weights.file_mapping import FileMapping, address_of, check_range
from streamflow.weights.file_reading import memory_at, read_fully

_NOEXEC_SEAL = 0x0008  # MFD_NOEXEC_SEAL, which Linux has from 6.3 on; it allows sealing, too
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@attrs.frozen
class AnonymousAddress:
    """Where other processes of the same user and process namespace find a file, and what they must find there."""

    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int


def process_namespace() -> dict[str, str | int]:
    """What two processes must have in common for one to find the other's files: machine, namespace, user."""
    return {
        "machine": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "process namespace": os.readlink("/proc/self/ns/pid"),
        "user": os.geteuid(),
    }


class AnonymousFile:
    """An open anonymous file. It owns its descriptor, which no program started from here inherits, until `close`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd: int | None = fd

    @classmethod
    def create(cls, name: str, nbytes: int) -> AnonymousFile:
        """A new one, all zeros, that takes no memory yet. ``name`` is for people who look into ``/proc``.

        :raises OSError: if the system has none to give.
        """
        made = cls(_memfd(name), max(nbytes, 1))
        try:
            os.ftruncate(made.fileno(), made.nbytes)
            fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def open_at(cls, address: AnonymousAddress) -> AnonymousFile:
        """The file of another process, which must have it open still.

        :raises OSError: if the system does not allow it, or what is there is not that file.
        """
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        opened = cls(fd, address.nbytes)
        try:
            if opened.address != attrs.evolve(address, pid=os.getpid(), fd=fd) or not opened._has(_SIZE_SEALS):
                raise FileNotFoundError(f"descriptor {address.fd} of process {address.pid} is another file by now")
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def address(self) -> AnonymousAddress:
        """Where others find it, until it is sealed or closed here."""
        status = os.fstat(self.fileno())
        return AnonymousAddress(os.getpid(), self.fileno(), status.st_dev, status.st_ino, status.st_size)

    @property
    def path(self) -> str:
        """A path by which it can be opened for reading, while it is open here."""
        return f"/proc/{os.getpid()}/fd/{self.fileno()}"

    @contextmanager
    def writing(self, start: int, nbytes: int) -> Iterator[int]:
        """The address of ``nbytes`` of it from ``start`` on (a multiple of the page size), writable within the context.

        :raises OSError: if it cannot be mapped.
        """
        check_range("an anonymous file", start, nbytes, self.nbytes)
        with mmap.mmap(self.fileno(), nbytes, flags=mmap.MAP_SHARED, offset=start) as pages:
            pages.madvise(mmap.MADV_DONTFORK)  # a child would keep it writable, and so from being sealed
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without huge pages
                    pages.madvise(mmap.MADV_HUGEPAGE)
            yield address_of(pages)

    def seal(self) -> None:
        """Let nobody change a byte of it any more. Every process that has it does this once, in any order.

        :raises OSError: if a process still has it mapped for writing.
        """
        fcntl.fcntl(self.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        writable = self.fileno()
        # kernels before 6.7 let a sealed file be mapped only through a descriptor that cannot write
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        os.close(writable)

    @property
    def is_sealed(self) -> bool:
        """Whether `seal` was called, here or elsewhere."""
        return self._has(_SIZE_SEALS | fcntl.F_SEAL_WRITE)

    def _has(self, seals: int) -> bool:
        return fcntl.fcntl(self.fileno(), fcntl.F_GET_SEALS) & seals == seals

    def map(self) -> FileMapping:
        """A new mapping of all of it, shared and read-only, that the caller closes. It outlives `close`.

        :raises SourceReadError: if it cannot be mapped.
        """
        return FileMapping(self.path, self.fileno(), self.nbytes)

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        """Put bytes ``start`` to ``start + nbytes`` at ``address``. Blocks; from any number of threads.

        :raises SourceReadError: if the system cannot read them.
        :raises ValueError: if the range is not inside the file.
        """
        check_range("an anonymous file", start, nbytes, self.nbytes)
        if nbytes:  # an empty tensor may have no address
            read_fully(self.fileno(), memory_at(address, nbytes), start, self.path, self.nbytes)

    def fileno(self) -> int:
        """The descriptor, valid until `seal` or `close`.

        :raises ValueError: if it is closed.
        """
        if self._fd is None:
            raise ValueError("the anonymous file is closed")
        return self._fd

    def close(self) -> None:
        """Close it here; nobody may be reading. Mappings of it stay. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def _memfd(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _NOEXEC_SEAL)
    except OSError:  # an older kernel
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
