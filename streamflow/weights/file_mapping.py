"""A shared, read-only mapping of a whole file that cannot be closed under memory that still uses it. No torch."""

from __future__ import annotations

import ctypes
import mmap
import os

from streamflow.stages.errors import SourceReadError
from streamflow.weights.errors import CheckpointClosedError, CheckpointInUseError


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer, part of its stable ABI: the only way to learn where a read-only buffer lies."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class FileMapping:
    """``MAP_SHARED | PROT_READ`` over a whole file; the pages stay those of the page cache.

    Everything handed out keeps the mapping alive and makes ``close`` raise until it is gone. The memory must never be
    written to: that, like reading it after the file was truncated, is a signal and not an error.

    :raises SourceReadError: if the file is smaller than ``file_bytes`` or the system cannot map it.
    """

    def __init__(self, path: str, fd: int, file_bytes: int) -> None:
        self.path, self.nbytes = path, file_bytes
        try:
            # ValueError: mmap compares the length with the file's size
            self._mmap = mmap.mmap(fd, file_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as failure:
            raise SourceReadError(path, 0, file_bytes, min(os.fstat(fd).st_size, file_bytes), str(failure)) from failure
        self._address = address_of(self._mmap)

    @property
    def closed(self) -> bool:
        return self._mmap.closed

    @property
    def address(self) -> int:
        """Where the mapping begins.

        :raises CheckpointClosedError: if it is closed.
        """
        if self.closed:
            raise CheckpointClosedError(self.path)
        return self._address

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """A read-only view of these bytes: writing through it is a TypeError.

        :raises CheckpointClosedError: if the mapping is closed.
        :raises ValueError: if the range is not inside the file.
        """
        self._check(offset, nbytes)
        return memoryview(self._mmap)[offset : offset + nbytes]

    def buffer(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """These bytes as a buffer for ``torch.frombuffer``, which would warn about a read-only one. Do not write to it.

        :raises CheckpointClosedError: if the mapping is closed.
        :raises ValueError: if the range is not inside the file.
        """
        view = self.memory(offset, nbytes)
        array = (ctypes.c_ubyte * nbytes).from_address(self._address + offset)
        # The tensor holds the array, the array this view, and the view makes mmap.close() raise.
        array.__dict__["view"] = view
        return array

    def close(self) -> None:
        """Unmap. Closing twice is fine.

        :raises CheckpointInUseError: if anything handed out is still alive; the mapping then stays as it is.
        """
        try:
            self._mmap.close()
        except BufferError as failure:
            raise CheckpointInUseError(self.path, "views of its mapping are alive") from failure

    def _check(self, offset: int, nbytes: int) -> None:
        if self.closed:
            raise CheckpointClosedError(self.path)
        check_range(self.path, offset, nbytes, self.nbytes)


def check_range(path: str, offset: int, nbytes: int, file_bytes: int) -> None:
    """Nothing, if ``nbytes`` from ``offset`` on lie inside the file.

    :raises ValueError: if they do not.
    """
    if offset < 0 or nbytes < 0 or offset + nbytes > file_bytes:
        raise ValueError(f"{path}: {nbytes:,} bytes at offset {offset:,} are not inside its {file_bytes:,} bytes")


def address_of(mapping: mmap.mmap) -> int:
    """Where ``mapping`` begins. Nothing is held: it can be closed all the same."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapping), ctypes.byref(found), 0)
    try:
        return int(found.buf)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
