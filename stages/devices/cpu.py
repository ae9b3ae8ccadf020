"""The cpu device: slots are host memory, a copy stream is a worker thread, an event is a thread event.

It is a real backend (models larger than memory run from a mapped checkpoint), and it models slower hardware for tests
and benchmarks: a link by sleeping, a number of compute units, a byte cap.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from streamflow.stages.devices.base import Event, Located, MemoryReading, Registrar, Stream
from streamflow.stages.devices.memory import MemoryMeter
from streamflow.stages.errors import DeviceMemoryError, DeviceStreamError
from streamflow.stages.layout import ALIGNMENT_BYTES
from streamflow.stages.threads import ThreadCrew, WorkerThread


class CpuEvent:
    """A point in a `CpuCopyStream`, or one that has happened already."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._happened = threading.Event()
        self._failure: BaseException | None = None

    def happen(self, failure: BaseException | None = None) -> None:
        """Release the waiters; with ``failure``, by an error."""
        self._failure = failure
        self._happened.set()

    def is_done(self) -> bool:
        return self._happened.is_set() and self._failure is None

    def wait(self) -> None:
        self._happened.wait()
        if self._failure is not None:
            raise DeviceStreamError(self._stream, self._failure) from self._failure


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a flat uint8 tensor onto another of its size, without torch's intra-op pool (it belongs to the model)."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


class ModelledLink:
    """A link over which bytes take their time, one copy after the other. Devices with the same one share it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()

    def move(self, work: Callable[[], None], nbytes: int) -> None:
        """Do ``work``, in at least the time that ``nbytes`` take. Blocks."""
        with self._lock:
            started = time.perf_counter()
            work()
            time.sleep(max(0.0, started + nbytes / self._bytes_per_s - time.perf_counter()))


class CpuCopyStream:
    """A worker thread that copies or communicates; work after a failed piece of work is skipped and fails alike."""

    def __init__(self, name: str, thread: WorkerThread, link: ModelledLink | None) -> None:
        self.name = name
        self._thread = thread
        self._link = link
        self._failure: BaseException | None = None

    def wait(self, event: Event) -> None:
        self._thread.submit(lambda: self._run(event.wait))

    def record(self, reuse: Event | None = None) -> CpuEvent:
        event = CpuEvent(self.name)
        self._thread.submit(lambda: event.happen(self._failure))
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.submit(lambda: copy_bytes(target, source), source.numel())

    def copy_part(self, target: Located, start: int, source: Located, nbytes: int) -> None:
        self.copy(target.part(start, nbytes), source.part(0, nbytes))

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        link = self._link
        self._thread.submit(lambda: self._run(work if link is None else lambda: link.move(work, nbytes)))

    def _run(self, work: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                work()
            except BaseException as failure:
                self._failure = failure

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin_block(self) -> None:
        pass

    def end_block(self) -> None:
        pass


class CpuComputeStream:
    """The calling thread itself: work happens at once, and waiting blocks the thread."""

    def __init__(self, name: str, compute_units: threading.Semaphore | None) -> None:
        self.name = name
        self._compute_units = compute_units

    def wait(self, event: Event) -> None:
        event.wait()

    def record(self, reuse: Event | None = None) -> CpuEvent:
        event = CpuEvent(self.name)
        event.happen()
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy_bytes(target, source)

    def copy_part(self, target: Located, start: int, source: Located, nbytes: int) -> None:
        self.copy(target.part(start, nbytes), source.part(0, nbytes))

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        work()

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin_block(self) -> None:
        if self._compute_units is not None:
            self._compute_units.acquire()

    def end_block(self) -> None:
        if self._compute_units is not None:
            self._compute_units.release()


class HostRegistrar:
    """Host memory needs no lock to be read by a host device."""

    def why_not_mappings(self) -> str | None:
        return "the device is the host and reads any memory"

    def probe_command(self, path: str, nbytes: int) -> Sequence[str] | None:
        return None

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def is_page_locked(self, address: int) -> bool:
        return False


class CpuDevice:
    """The host as a device.

    ``link_bytes_per_s``: copies take at least their bytes over this rate (None: as fast as memory). ``link``: a link
    that other devices may have, too; it goes before ``link_bytes_per_s``. ``peer_bytes_per_s``: the same for what a
    communication stream receives, over a link of its own. ``compute_units``: how many blocks may compute at once (None:
    any number). ``memory_limit_bytes``: allocations beyond fail (None: no cap).
    """

    is_host = True
    torch_device = torch.device("cpu")

    def __init__(
        self,
        *,
        link_bytes_per_s: float | None = None,
        link: ModelledLink | None = None,
        peer_bytes_per_s: float | None = None,
        compute_units: int | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self._link = link if link is not None or link_bytes_per_s is None else ModelledLink(link_bytes_per_s)
        self._peer_link = None if peer_bytes_per_s is None else ModelledLink(peer_bytes_per_s)
        self._compute_units = None if compute_units is None else threading.Semaphore(compute_units)
        self._meter = MemoryMeter("cpu", memory_limit_bytes)
        self.registrar: Registrar = HostRegistrar()
        self._crew: ThreadCrew | None = None

    @property
    def link(self) -> Hashable:
        return self if self._link is None else self._link

    async def open(self, crew: ThreadCrew) -> None:
        self._crew = crew

    def open_copy_stream(self, name: str) -> Stream:
        return self._open_stream(name, self._link)

    def open_communication_stream(self, name: str) -> Stream:
        return self._open_stream(name, self._peer_link)

    def _open_stream(self, name: str, link: ModelledLink | None) -> CpuCopyStream:
        if self._crew is None:
            raise RuntimeError("the cpu device makes streams only between open and close")
        return CpuCopyStream(name, self._crew.start(f"streamflow {name} stream"), link)

    def open_compute_stream(self, name: str) -> Stream:
        return CpuComputeStream(name, self._compute_units)

    def caller_stream(self) -> Stream:
        return CpuComputeStream("caller", None)

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._meter.take(nbytes)
        # torch aligns to 64 bytes only; kernels may choose other code, and other last bits, by alignment
        try:
            raw = torch.empty(nbytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=self.torch_device)
        except RuntimeError as failure:  # how torch says that the host has not that much
            self._meter.give_back(nbytes)
            raise DeviceMemoryError("cpu", nbytes, self._meter.in_use, self._meter.limit_bytes) from failure
        start = -raw.data_ptr() % ALIGNMENT_BYTES
        return raw[start : start + nbytes]

    def free(self, buffer: torch.Tensor) -> None:
        self._meter.give_back(buffer.numel())

    def memory(self) -> MemoryReading:
        limit = self._meter.limit_bytes
        free = None if limit is None else limit - self._meter.in_use
        return MemoryReading(self._meter.in_use, self._meter.peak, cached=0, free=free, total=limit)

    def release_cache(self) -> None:
        pass

    def close(self) -> None:
        self._crew = None
