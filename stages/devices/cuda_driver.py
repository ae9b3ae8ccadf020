"""What torch does not show of the CUDA driver: device attributes, and a probe that runs in a process of its own.

Standard library only: `probe_command` runs this very file as a program, which must not have to import torch.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from typing import Any

#: CU_DEVICE_ATTRIBUTE_...
COMPUTE_MODE = 20
READ_ONLY_HOST_REGISTER_SUPPORTED = 113
#: CU_MEMHOSTREGISTER_READ_ONLY; cudaHostRegisterReadOnly is the same bit.
READ_ONLY = 8
#: Results that say that a second process cannot have a context now (the device is out of memory, or not available), and
#: nothing about registration.
NO_CONTEXT = (2, 46)


class DriverCallError(RuntimeError):
    """The driver refused a call; ``code`` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        self.call, self.code, self.name = call, code, name
        super().__init__(f"{call} returned {name} ({code})")


class CudaDriver:
    """The driver's library, initialised. ``ordinal`` counts devices as torch does.

    :raises OSError: if there is no driver.
    :raises DriverCallError: if it cannot be initialised.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library: Any = ctypes.CDLL(library)
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call the function ``name``.

        :raises DriverCallError: if it returns anything but success.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DriverCallError(name, code, self._name_of(code))

    def _name_of(self, code: int) -> str:
        found = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(found))
        return (found.value or b"an unknown result").decode()

    def device(self, ordinal: int) -> ctypes.c_int:
        """The driver's handle of a device."""
        found = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(found), ordinal)
        return found

    def attribute(self, attribute: int, ordinal: int) -> int:
        """The value of a device attribute."""
        found = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(found), attribute, self.device(ordinal))
        return found.value

    def enter_context(self, ordinal: int) -> None:
        """Make the device's primary context the calling thread's; it stays so until the process ends."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device(ordinal))
        self.call("cuCtxSetCurrent", context)


def why_not_mappings(ordinal: int) -> str | None:
    """Why the device cannot read shared read-only mappings; None if it says that it can."""
    try:
        supported = CudaDriver().attribute(READ_ONLY_HOST_REGISTER_SUPPORTED, ordinal)
    except (OSError, DriverCallError) as failure:
        return f"the CUDA driver cannot be asked whether it registers read-only memory: {failure}"
    return None if supported else "the device does not register read-only host memory"


def probe_command(path: str, nbytes: int, ordinal: int) -> list[str]:
    """The program that registers the first ``nbytes`` of the file at ``path`` for a device and says how it went."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), path, str(nbytes), str(ordinal)]


def probe(driver: CudaDriver, path: str, nbytes: int, ordinal: int) -> dict[str, object]:
    """Register and unregister; the answer says what stands against it (``problem``) and whether that is certain."""
    if driver.attribute(COMPUTE_MODE, ordinal) != 0:
        return _answer("the device is in exclusive compute mode, so that a probe cannot use it", is_conclusive=False)
    try:
        driver.enter_context(ordinal)
    except DriverCallError as failure:
        return _answer(f"no second process can use the device: {failure}", is_conclusive=failure.code not in NO_CONTEXT)
    address = ctypes.c_void_p(_map(path, nbytes))
    try:
        driver.call("cuMemHostRegister_v2", address, ctypes.c_size_t(nbytes), READ_ONLY)
        driver.call("cuMemHostUnregister", address)
    except DriverCallError as failure:
        return _answer(str(failure))
    return _answer(None)


def _answer(problem: str | None, *, is_conclusive: bool = True) -> dict[str, object]:
    return {"problem": problem, "is_conclusive": is_conclusive}


def _map(path: str, nbytes: int) -> int:
    """The address of a mapping that is like those of the library, and stays until the process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return int(address)


def main(arguments: list[str]) -> None:
    """Probe, and print the answer as one line of JSON."""
    path, nbytes, ordinal = arguments
    try:
        answer = probe(CudaDriver(), path, int(nbytes), int(ordinal))
    except (OSError, DriverCallError) as failure:
        answer = _answer(str(failure))
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what the driver does at exit is not what was asked


if __name__ == "__main__":
    main(sys.argv[1:])
