"""The cuda device. What only CUDA has is in this file and its neighbours; nothing in it assumes one GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import torch

from streamflow.stages.devices.base import Event, Located, MemoryReading, Stream
from streamflow.stages.devices.cuda_queue import driver_queue
from streamflow.stages.devices.cuda_registrar import CudaRegistrar
from streamflow.stages.devices.memory import MemoryMeter
from streamflow.stages.errors import DeviceMemoryError, DeviceStreamError
from streamflow.stages.threads import ThreadCrew


class CudaEvent:
    """A CUDA event; waiting for it sleeps instead of spinning."""

    def __init__(self, stream: torch.cuda.Stream, name: str) -> None:
        self._name = name
        self.raw = torch.cuda.Event(blocking=True)
        self.raw.record(stream)
        self.handle: int = self.raw.cuda_event

    def is_done(self) -> bool:
        try:
            return bool(self.raw.query())
        except RuntimeError:  # the device failed: whoever waits is told
            return False

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
        self._handle = raw.cuda_stream

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError(f"stream {self.name!r} can wait for CUDA events only, not for {event!r}")
        try:
            self.raw.wait_event(event.raw)
        except RuntimeError as failure:
            raise DeviceStreamError(self.name, failure) from failure

    def record(self, reuse: Event | None = None) -> CudaEvent:
        if isinstance(reuse, CudaEvent):
            queue = driver_queue()
            if queue is None or queue.record(reuse.handle, self._handle):
                reuse.raw.record(self.raw)
            return reuse
        return CudaEvent(self.raw, self.name)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if torch.cuda.current_stream(target.device) == self.raw:  # threads that only copy stay in the stream
            target.copy_(source, non_blocking=True)
        else:
            with torch.cuda.stream(self.raw):
                target.copy_(source, non_blocking=True)

    def copy_part(self, target: Located, start: int, source: Located, nbytes: int) -> None:
        queue = driver_queue()
        if queue is None or queue.copy(target.address + start, source.address, nbytes, self._handle):
            # what the driver refuses, torch does: it gives a new thread its context, and has errors of its own
            self.copy(target.part(start, nbytes), source.part(0, nbytes))

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        with torch.cuda.stream(self.raw):
            work()

    def activate(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.raw)

    def begin_block(self) -> None:
        pass

    def end_block(self) -> None:
        pass


class _StreamRegistry:
    """The process's streams of streamflow, by device: no two users share one, and given-back ones are used again.

    torch hands out 32 pooled streams in turn, and keeps a workspace of the matrix library for each that ever computed:
    taking new ones at each opening would collect both.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._taken: dict[torch.device, set[int]] = {}

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """A stream that nobody else in streamflow has.

        :raises DeviceStreamError: if torch's pool has no other.
        """
        with self._lock:
            taken = self._taken.setdefault(device, set())
            free = self._free.setdefault(device, [])
            stream = free.pop() if free else self._from_pool(device, taken)
            taken.add(stream.cuda_stream)
            return stream

    def _from_pool(self, device: torch.device, taken: set[int]) -> torch.cuda.Stream:
        for _ in range(64):
            stream = torch.cuda.Stream(device)
            if stream.cuda_stream not in taken:
                return stream
        raise DeviceStreamError("stream pool", RuntimeError(f"all of torch's pooled streams are taken ({len(taken)})"))

    def give_back(self, device: torch.device, streams: list[torch.cuda.Stream]) -> None:
        """Let others have the streams; nothing may be queued on them any more."""
        with self._lock:
            self._free.setdefault(device, []).extend(reversed(streams))
            self._taken.setdefault(device, set()).difference_update(stream.cuda_stream for stream in streams)


_STREAMS = _StreamRegistry()


class CudaDevice:
    """One CUDA device, through torch's allocator and runtime."""

    is_host = False

    def __init__(self, device: torch.device | None = None) -> None:
        index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self._meter = MemoryMeter(str(self.torch_device))
        self.registrar = CudaRegistrar(self.torch_device)
        self._streams: list[torch.cuda.Stream] = []
        self._allocations: dict[int, torch.cuda.Event] = {}

    @property
    def link(self) -> Hashable:
        return self.torch_device

    async def open(self, crew: ThreadCrew) -> None:
        pass

    def open_copy_stream(self, name: str) -> Stream:
        return CudaStream(name, self._new_stream())

    def open_communication_stream(self, name: str) -> Stream:
        return CudaStream(name, self._new_stream())

    def open_compute_stream(self, name: str) -> Stream:
        return CudaStream(name, self._new_stream())

    def _new_stream(self) -> torch.cuda.Stream:
        stream = _STREAMS.take(self.torch_device)
        self._streams.append(stream)
        for allocation in list(self._allocations.values()):
            stream.wait_event(allocation)
        return stream

    def caller_stream(self) -> Stream:
        return CudaStream("caller", torch.cuda.current_stream(self.torch_device))

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as failure:
            limit = torch.cuda.mem_get_info(self.torch_device)[1]
            raise DeviceMemoryError(str(self.torch_device), nbytes, self._meter.in_use, limit) from failure
        self._meter.take(nbytes)
        self._order_after_earlier_use(buffer)
        return buffer

    def _order_after_earlier_use(self, buffer: torch.Tensor) -> None:
        # torch may hand out memory that work queued on the allocating thread's stream still uses
        allocation = torch.cuda.Event()
        allocation.record(torch.cuda.current_stream(self.torch_device))
        self._allocations[buffer.data_ptr()] = allocation
        for stream in self._streams:
            stream.wait_event(allocation)

    def free(self, buffer: torch.Tensor) -> None:
        self._meter.give_back(buffer.numel())
        self._allocations.pop(buffer.data_ptr(), None)

    def memory(self) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        num_retries = torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries")
        return MemoryReading(self._meter.in_use, self._meter.peak, cached, free, total, num_retries)

    def release_cache(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def close(self) -> None:
        _STREAMS.give_back(self.torch_device, self._streams)
        self._streams = []
        self._allocations.clear()
