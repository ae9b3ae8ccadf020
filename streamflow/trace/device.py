"""A device whose copy and communication streams and allocations are recorded; everything else is the device's own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from streamflow.stages.devices.base import Device, Event, Located, MemoryReading, Registrar, Stream
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.timing import DeviceClock, Mark
from streamflow.trace.records import AllocationRecord

#: A block and the number of its fetch (None: it stays on the device).
Label = tuple[int | None, int | None]

_LABEL: ContextVar[Label] = ContextVar("streamflow fetch", default=(None, None))


class CopySink(Protocol):
    """Where the recorded streams of a device tell what they did."""

    clock: DeviceClock

    def label_at(self, address: int) -> Label:
        """What is being brought to device address ``address``."""

    def copied(self, stream: str, label: Label, nbytes: int, begin: Mark, end: Mark) -> None:
        """Work was queued on ``stream``."""

    def gathered(self, stream: str, number: int, label: Label, nbytes: int, begin: Mark, end: Mark) -> None:
        """Gather ``number`` of ``stream`` was queued."""

    def allocated(self, record: AllocationRecord) -> None:
        """Device memory was allocated."""


class TracedStream:
    """A copy stream with marks around everything that it is given to do."""

    def __init__(self, inner: Stream, sink: CopySink, fetching: Fetching) -> None:
        self._inner, self._sink, self._fetching = inner, sink, fetching

    @property
    def name(self) -> str:
        return self._inner.name

    def wait(self, event: Event) -> None:
        self._inner.wait(event)

    def record(self, reuse: Event | None = None) -> Event:
        return self._inner.record(reuse)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        begin = self._sink.clock.mark(self._inner)
        self._inner.copy(target, source)
        end = self._sink.clock.mark(self._inner)
        self._sink.copied(self.name, self._sink.label_at(target.data_ptr()), target.numel(), begin, end)

    def copy_part(self, target: Located, start: int, source: Located, nbytes: int) -> None:
        begin = self._sink.clock.mark(self._inner)
        self._inner.copy_part(target, start, source, nbytes)
        end = self._sink.clock.mark(self._inner)
        self._sink.copied(self.name, self._sink.label_at(target.address + start), nbytes, begin, end)

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        begin = self._sink.clock.mark(self._inner)
        self._inner.submit(work, nbytes)
        end = self._sink.clock.mark(self._inner)
        self._sink.copied(self.name, self._fetching.label, nbytes, begin, end)

    def activate(self) -> AbstractContextManager[object]:
        return self._inner.activate()

    def begin_block(self) -> None:
        self._inner.begin_block()

    def end_block(self) -> None:
        self._inner.end_block()


class TracedGathers(TracedStream):
    """A communication stream: what it is given to do are gathers, numbered as they are queued."""

    def __init__(self, inner: Stream, sink: CopySink, fetching: Fetching) -> None:
        super().__init__(inner, sink, fetching)
        self._numbers = itertools.count()

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        begin = self._sink.clock.mark(self._inner)
        self._inner.submit(work, nbytes)
        end = self._sink.clock.mark(self._inner)
        self._sink.gathered(self.name, next(self._numbers), self._fetching.label, nbytes, begin, end)


class Fetching:
    """What is being fetched: work without an address is for that. It goes along with the context."""

    @property
    def label(self) -> Label:
        """What the calling context fetches."""
        return _LABEL.get()

    @contextmanager
    def of(self, label: Label) -> Iterator[None]:
        """Within it, the calling context fetches ``label``."""
        token = _LABEL.set(label)
        try:
            yield
        finally:
            _LABEL.reset(token)


class TracedDevice:
    """``inner``, telling ``sink`` about the copy and communication streams that it opens from here on, and about its
    allocations.

    Opening and closing it opens and closes ``inner``.
    """

    def __init__(self, inner: Device, sink: CopySink, fetching: Fetching) -> None:
        self._inner, self._sink, self._fetching = inner, sink, fetching

    @property
    def torch_device(self) -> torch.device:
        return self._inner.torch_device

    @property
    def is_host(self) -> bool:
        return self._inner.is_host

    @property
    def registrar(self) -> Registrar:
        return self._inner.registrar

    @property
    def link(self) -> Hashable:
        return self._inner.link

    async def open(self, crew: ThreadCrew) -> None:
        await self._inner.open(crew)

    def open_copy_stream(self, name: str) -> Stream:
        return TracedStream(self._inner.open_copy_stream(name), self._sink, self._fetching)

    def open_communication_stream(self, name: str) -> Stream:
        return TracedGathers(self._inner.open_communication_stream(name), self._sink, self._fetching)

    def open_compute_stream(self, name: str) -> Stream:
        return self._inner.open_compute_stream(name)

    def caller_stream(self) -> Stream:
        return self._inner.caller_stream()

    def allocate(self, nbytes: int) -> torch.Tensor:
        started = time.perf_counter()
        buffer = self._inner.allocate(nbytes)
        self._sink.allocated(AllocationRecord(nbytes, started, time.perf_counter()))
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        self._inner.free(buffer)

    def memory(self) -> MemoryReading:
        return self._inner.memory()

    def release_cache(self) -> None:
        self._inner.release_cache()

    def close(self) -> None:
        self._inner.close()
