"""Queueing copies from page-locked memory in one call that keeps the interpreter.

torch's copy gives the interpreter away for a few microseconds, and with packing threads about it is not back for
a good deal longer: handing it over takes tens of microseconds, one thread at a time. Measured on an H200 with 10
packing threads: each chunk cost 250 us of everybody's time, whether packing it was hidden or not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

#: ``cuMemcpyHtoDAsync``: device address, host address, bytes and stream; returns a CUresult.
QueueCopy = Callable[[int, int, int, int], int]


@cache
def queue_copy_call() -> QueueCopy | None:
    """The driver's call; None where there is no driver.

    The stream's context must be the calling thread's, as it is once torch has done anything with the device there: else
    the call returns an error, and nothing was queued. The host memory must be page-locked: else it blocks.
    """
    try:
        call = ctypes.PyDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2  # PyDLL: without giving the interpreter away
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    call.restype = ctypes.c_int

    def queue_copy(target: int, source: int, nbytes: int, stream: int) -> int:
        return int(call(target, source, nbytes, stream))

    return queue_copy
