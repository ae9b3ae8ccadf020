"""The cuda device. Everything that only CUDA has is in this file; nothing in it assumes one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from streamflow.stages.devices.base import Event, MemoryReading, Stream
from streamflow.stages.devices.memory import MemoryMeter
from streamflow.stages.errors import DeviceMemoryError, DeviceStreamError
from streamflow.stages.threads import ThreadCrew


class CudaEvent:
    """A CUDA event; waiting for it sleeps instead of spinning."""

    def __init__(self, stream: torch.cuda.Stream, name: str) -> None:
        self._name = name
        self.raw = torch.cuda.Event(blocking=True)
        self.raw.record(stream)

    def is_done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        try:
            self.raw.synchronize()
        except RuntimeError as failure:  # torch reports a failed kernel this way
            raise DeviceStreamError(self._name, failure) from failure


class CudaStream:
    """A CUDA stream of streamflow's own, or the caller's current one."""

    def __init__(self, name: str, raw: torch.cuda.Stream) -> None:
        self.name = name
        self.raw = raw

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError(f"stream {self.name!r} can wait for CUDA events only, not for {event!r}")
        self.raw.wait_event(event.raw)

    def record(self) -> CudaEvent:
        return CudaEvent(self.raw, self.name)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.raw):
            target.copy_(source, non_blocking=True)

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        with torch.cuda.stream(self.raw):
            work()

    def activate(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.raw)

    def begin_block(self) -> None:
        pass

    def end_block(self) -> None:
        pass


class CudaPageLock:
    """A range that was given to the driver with ``cudaHostRegister``, and is taken back by its exact base."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory
        _check(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0), "cudaHostRegister", memory.numel())

    def release(self) -> None:
        if self._memory is not None:
            nbytes = self._memory.numel()
            _check(_cudart().cudaHostUnregister(self._memory.data_ptr()), "cudaHostUnregister", nbytes)
            self._memory = None


def _cudart() -> Any:
    return torch.cuda.cudart()


def _check(code: Any, call: str, nbytes: int) -> None:
    if int(code) != 0:
        raise DeviceStreamError("host registration", RuntimeError(f"{call} of {nbytes:,} bytes returned {code}"))


class CudaDevice:
    """One CUDA device, through torch's allocator and runtime."""

    is_host = False

    def __init__(self, device: torch.device | None = None) -> None:
        index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self._meter = MemoryMeter(str(self.torch_device))
        self._compute_streams: list[torch.cuda.Stream] = []

    async def open(self, crew: ThreadCrew) -> None:
        pass

    def open_copy_stream(self, name: str) -> Stream:
        return CudaStream(name, self._new_stream(priority=0))

    def open_compute_stream(self, name: str) -> Stream:
        return CudaStream(name, self._new_stream(priority=0))

    def _new_stream(self, priority: int) -> torch.cuda.Stream:
        # torch hands out pooled streams in turn: take the next until it is none that is in use here
        taken = {stream.cuda_stream for stream in self._compute_streams}
        for _ in range(64):
            stream = torch.cuda.Stream(self.torch_device, priority=priority)
            if stream.cuda_stream not in taken:
                self._compute_streams.append(stream)
                return stream
        raise DeviceStreamError("stream pool", RuntimeError(f"all of torch's pooled streams are taken ({len(taken)})"))

    def caller_stream(self) -> Stream:
        return CudaStream("caller", torch.cuda.current_stream(self.torch_device))

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as failure:
            limit = torch.cuda.mem_get_info(self.torch_device)[1]
            raise DeviceMemoryError(str(self.torch_device), nbytes, self._meter.in_use, limit) from failure
        self._meter.take(nbytes)
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        self._meter.give_back(buffer.numel())

    def lock_pages(self, memory: torch.Tensor) -> CudaPageLock:
        return CudaPageLock(memory)

    def memory(self) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return MemoryReading(self._meter.in_use, self._meter.peak, cached, free, total)

    def close(self) -> None:
        self._compute_streams.clear()
