"""Short calls of the CUDA driver that queue work: by address and handle, without giving the interpreter away.

A thread that packs megabytes at a time finds nothing of the interpreter, nor of torch, in the processor's caches, and
holds up every other thread until it has. torch's copy of a tensor with the slices it needs then takes ten times as long
as these calls, and gives the interpreter away in addition, which has to be waited for again.
"""

from __future__ import annotations

import ctypes
from functools import cache

LIBRARY = "libcuda.so.1"


class DriverQueue:
    """The calls. Each returns the driver's result, 0 for success, and queues nothing otherwise.

    They work in threads that have a device's context already, as after any call of torch for that device.

    :raises OSError: if there is no driver.
    :raises AttributeError: if it has not these calls.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        driver = ctypes.PyDLL(library)  # keeps the interpreter, unlike CDLL
        self._copy, self._record = driver.cuMemcpyHtoDAsync_v2, driver.cuEventRecord
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._record.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        """Queue a copy from page-locked host memory to the device."""
        return int(self._copy(target, source, nbytes, stream))

    def record(self, event: int, stream: int) -> int:
        """Record the event anew; it has been recorded by torch before."""
        return int(self._record(event, stream))


@cache
def driver_queue() -> DriverQueue | None:
    """The process's; None where there is none, and torch has to do it."""
    try:
        return DriverQueue()
    except (OSError, AttributeError):
        return None
