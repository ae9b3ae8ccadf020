"""Read bytes of an open file into memory at an address: the kernel copies, no tensor library takes part.

Reads, unlike a mapping, turn a file that shrank into an error instead of a signal.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import cast

from streamflow.stages.errors import SourceReadError

_WRITABLE = 0x200  # PyBUF_WRITE
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


@lru_cache(maxsize=1024)  # staging buffers are filled over and over, with cold caches: making a view then takes long
def memory_at(address: int, nbytes: int) -> memoryview:
    """``nbytes`` writable bytes at ``address``, never to be released. The caller keeps that memory alive."""
    return cast(memoryview, _memory_view(address, nbytes, _WRITABLE))


def read_fully(fd: int, buffer: memoryview, offset: int, path: str, file_bytes: int) -> None:
    """Fill ``buffer`` with the file's bytes from ``offset`` on; blocks, releases the interpreter while it reads.

    ``path`` and ``file_bytes`` (the size when the file was opened) are for the error.

    :raises SourceReadError: if the file ends before the buffer is full, or the system cannot read it.
    """
    wanted, done = buffer.nbytes, 0
    while done < wanted:
        try:
            got = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as failure:
            raise SourceReadError(path, offset, wanted, done, failure.strerror or str(failure)) from failure
        if got == 0:
            raise SourceReadError(path, offset, wanted, done, _why_it_ended(fd, file_bytes))
        done += got


def _why_it_ended(fd: int, file_bytes: int) -> str:
    now = os.fstat(fd).st_size
    if now < file_bytes:
        return f"the file shrank from {file_bytes:,} to {now:,} bytes after it was opened"
    return f"the file ended although it should have {file_bytes:,} bytes"
