"""Page-locking host memory for a CUDA device, through the runtime that torch uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from streamflow.stages.devices import cuda_driver
from streamflow.stages.errors import HostRegistrationError


class CudaRegistrar:
    """Registers ranges in the context of one device. Unified addressing makes them readable by all others, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[int, int] = {}

    def why_not_mappings(self) -> str | None:
        return cuda_driver.why_not_mappings(self._device.index)

    def probe_command(self, path: str, nbytes: int) -> Sequence[str] | None:
        return cuda_driver.probe_command(path, nbytes, self._device.index)

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        flags = cuda_driver.READ_ONLY if read_only else 0
        self._call("cudaHostRegister", nbytes, lambda runtime: runtime.cudaHostRegister(address, nbytes, flags))
        self._sizes[address] = nbytes

    def unregister(self, address: int) -> None:
        nbytes = self._sizes.get(address, 0)
        self._call("cudaHostUnregister", nbytes, lambda runtime: runtime.cudaHostUnregister(address))
        self._sizes.pop(address, None)

    def is_page_locked(self, address: int) -> bool:
        with torch.cuda.device(self._device):
            byte = torch.frombuffer((ctypes.c_ubyte * 1).from_address(address), dtype=torch.uint8)
            return bool(byte.is_pinned())

    def _call(self, name: str, nbytes: int, call: Callable[[Any], Any]) -> None:
        with torch.cuda.device(self._device):  # in a new thread it would be the first one
            try:
                code = call(torch.cuda.cudart())
            except RuntimeError as failure:
                raise HostRegistrationError(name, nbytes, f"failed: {failure}") from failure
            if int(code) != 0:
                self._take_pending_error()
                raise HostRegistrationError(name, nbytes, f"returned {code}")

    def _take_pending_error(self) -> None:
        # the runtime keeps a refusal for its thread; torch raises it there at the next kernel launch, whoever's it is
        with suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(0)
