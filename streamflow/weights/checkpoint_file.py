"""One open safetensors file: its validated header, reads into memory, and a mapping on demand. No torch."""

from __future__ import annotations

import io
import os
import stat
import threading
from types import TracebackType

from streamflow.weights.errors import (
    CheckpointClosedError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CheckpointOpenError,
)
from streamflow.weights.file_mapping import FileMapping, check_range
from streamflow.weights.file_reading import memory_at, read_fully
from streamflow.weights.safetensors_header import LENGTH_BYTES, SafetensorsHeader, header_json_bytes, parse_header


def open_checkpoint_file(path: str | os.PathLike[str]) -> CheckpointFile:
    """The file at ``path``, open and with its header proven sound; nothing stays open when this raises. Blocks.

    :raises CheckpointNotFoundError: if there is no such file.
    :raises CheckpointOpenError: if it cannot be opened or is not a regular file.
    :raises CheckpointFormatError: if its header is not valid or does not fit its size.
    :raises SourceReadError: if its header cannot be read.
    """
    name = os.fspath(path)
    fd = _open(name)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointOpenError(name, "not a regular file")
        return CheckpointFile(name, fd, status, _read_header(name, fd, status.st_size))
    except BaseException:
        os.close(fd)
        raise


def _open(name: str) -> int:
    try:
        # O_NONBLOCK: opening a named pipe would wait for a writer; regular files do not care
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as failure:
        raise CheckpointNotFoundError(name, "there is no such file") from failure
    except OSError as failure:
        raise CheckpointOpenError(name, f"it cannot be opened ({failure.strerror})") from failure


def _read_header(name: str, fd: int, file_bytes: int) -> SafetensorsHeader:
    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        read_fully(fd, memoryview(data), offset, name, file_bytes)
        return bytes(data)

    size = header_json_bytes(name, read(0, min(LENGTH_BYTES, file_bytes)), file_bytes)
    return parse_header(name, read(LENGTH_BYTES, size), file_bytes)


class CheckpointFile:
    """An open file; owns its descriptor and its mapping until ``close``.

    Made by ``open_checkpoint_file``. Reads may come from several threads at once. ``status`` is what ``fstat`` said at
    opening (size, times, inode).
    """

    def __init__(self, path: str, fd: int, status: os.stat_result, header: SafetensorsHeader) -> None:
        self.path, self.status, self.header = path, status, header
        self._raw = io.FileIO(fd)  # closes the descriptor, with a ResourceWarning, should the owner forget to
        self._mapping: FileMapping | None = None
        self._readers = 0
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "mapped" if self._mapping is not None else "open"
        return f"<CheckpointFile {self.path!r} {state}, {len(self.header.entries)} tensors, {self.file_bytes:,} bytes>"

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def file_bytes(self) -> int:
        """The file's size when it was opened."""
        return self.header.file_bytes

    @property
    def closed(self) -> bool:
        return self._closed

    def pread_into(self, address: int, file_offset: int, nbytes: int) -> None:
        """Read ``nbytes`` from ``file_offset`` on into the memory at ``address``. Blocks; for worker threads.

        :raises CheckpointClosedError: if the file is closed.
        :raises SourceReadError: if the file shrank or cannot be read; the memory then holds part of the bytes.
        :raises ValueError: if the range is not inside the file.
        """
        check_range(self.path, file_offset, nbytes, self.file_bytes)
        # an empty tensor may have no address
        self._read(file_offset, memory_at(address, nbytes) if nbytes else memoryview(b""))

    def read_bytes(self, file_offset: int, nbytes: int) -> bytearray:
        """These bytes, in memory of their own. Blocks.

        :raises CheckpointClosedError: if the file is closed.
        :raises SourceReadError: if the file shrank or cannot be read.
        :raises ValueError: if the range is not inside the file.
        """
        check_range(self.path, file_offset, nbytes, self.file_bytes)
        data = bytearray(nbytes)
        self._read(file_offset, memoryview(data))
        return data

    def _read(self, file_offset: int, target: memoryview) -> None:
        # The descriptor stays open meanwhile: a reused number would read another file's bytes. This is done for every
        # chunk, with cold caches, where context managers would take a third of the time.
        with self._lock:
            if self._closed:
                raise CheckpointClosedError(self.path)
            self._readers += 1
        try:
            read_fully(self._raw.fileno(), target, file_offset, self.path, self.file_bytes)
        finally:
            with self._lock:
                self._readers -= 1

    def map(self) -> FileMapping:
        """The file's mapping, made on first use and closed with the file.

        :raises CheckpointClosedError: if the file is closed.
        :raises SourceReadError: if the file shrank or cannot be mapped.
        """
        with self._lock:
            if self._closed:
                raise CheckpointClosedError(self.path)
            if self._mapping is None:
                self._mapping = FileMapping(self.path, self._raw.fileno(), self.file_bytes)
            return self._mapping

    def close(self) -> None:
        """Unmap and close. Closing twice is fine.

        :raises CheckpointInUseError: if a read is under way or views of the mapping are alive; nothing is closed then.
        """
        with self._lock:
            if self._closed:
                return
            if self._readers:
                raise CheckpointInUseError(self.path, f"{self._readers} reads of it are under way")
            if self._mapping is not None:
                self._mapping.close()
            self._closed = True
            self._raw.close()
