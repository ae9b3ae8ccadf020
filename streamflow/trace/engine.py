"""What is recorded of one engine: its events, its fetches, its copy streams and its places."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, get_args

import attrs
import torch

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.engine import Engine
from streamflow.stages.events import EngineFailed, FetchIssued, FetchStarted, ObservedEvent, SlotFree
from streamflow.stages.images import BlockImage
from streamflow.stages.opening import OpenTransfer
from streamflow.stages.places import Place
from streamflow.stages.statistics import EngineStatistics
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.timing import DeviceClock, Mark, OnPacked, WaitKind
from streamflow.stages.transfers.base import Fetching as BegunFetch
from streamflow.stages.transfers.base import Transfer
from streamflow.trace.device import Fetching, Label, TracedDevice
from streamflow.trace.records import (
    AllocationRecord,
    CopyRecord,
    GatherRecord,
    LoopRecord,
    MemoryRecord,
    PackRecord,
    PassRecord,
    QueueRecord,
    Record,
    RunRecord,
    WaitRecord,
)
from streamflow.trace.ring import Ring

#: Waits for a copy that are shorter are none: an accelerator's stream takes a wait at once.
LEAST_WAIT_S = 5e-5


class EngineTrace:
    """The trace of an engine where none is recorded: everything stays as it is."""

    @property
    def packed_listener(self) -> OnPacked | None:
        """What a transfer that packs tells about its chunks; None: nothing."""
        return None

    def device(self, device: Device) -> Device:
        """``device`` for the engine to use."""
        return device

    def opener(self, open_transfer: OpenTransfer) -> OpenTransfer:
        """Opens the transfer for the engine to use."""
        return open_transfer

    def attach(self, engine: Engine) -> None:
        """Follow ``engine``, which has just been opened, from here on. On its loop."""


class RecordedEngine(EngineTrace):
    """Records an engine into ``ring``, as number ``index``. Nothing in it blocks or fails.

    ``components`` are its components' images, as for `open_engine`.
    """

    def __init__(
        self, index: int, components: Mapping[str, Mapping[int, BlockImage]], ring: Ring, clock: DeviceClock
    ) -> None:
        self.index, self.clock = index, clock
        self.components = {name: dict(images) for name, images in components.items()}
        images = {block: image for own in self.components.values() for block, image in own.items()}
        self.sizes: EngineStatistics | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._ring = ring
        self._device: Device | None = None
        self._block_of = {image.name: block for block, image in images.items()}
        self._fetching = Fetching()
        self._fetch_ids = itertools.count(1)
        self._fetch_of: dict[int, int] = {}
        self._labels: dict[int, Label] = {}
        self._addresses: tuple[int, ...] = ()

    def device(self, device: Device) -> Device:
        self._device = device
        return TracedDevice(device, self, self._fetching)

    def opener(self, open_transfer: OpenTransfer) -> OpenTransfer:
        async def open_traced(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
            return TracedTransfer(await open_transfer(device, stream, crew), self)

        return open_traced

    def attach(self, engine: Engine) -> None:
        self.sizes = engine.statistics()
        self.sample_memory()
        engine.broadcast.listen(self.note)
        for place in engine.places:
            place.watch = _Watch(place, self)

    @property
    def packed_listener(self) -> OnPacked | None:
        return self._packed

    def _packed(self, image: str, nbytes: int, taken_up: float, began: float, ended: float) -> None:
        block = self._block_of.get(image)  # None: a component that moves as a whole
        thread = threading.current_thread().name
        self.keep(PackRecord(thread, *self._label(block), nbytes, taken_up, began, ended))

    @property
    def labels(self) -> dict[int, str]:
        """The blocks' names."""
        return {block: name for name, block in self._block_of.items()}

    def keep(self, record: Record) -> None:
        """Put ``record`` into the ring. From any thread."""
        self._ring.append(self.index, record)

    # The loop's side

    def note(self, event: ObservedEvent) -> None:
        """Take note of ``event``, which the engine publishes now."""
        at = time.perf_counter()
        kind = type(event)
        fetch = None
        if isinstance(event, FetchStarted):
            fetch = self._fetch_of[event.block] = next(self._fetch_ids)
        elif isinstance(event, (FetchIssued, SlotFree)):
            fetch = self._fetch_of.get(event.block)
        self.keep(LoopRecord(at, kind.__name__, VALUES_OF[kind](event), fetch))
        if isinstance(event, EngineFailed):
            self.on_failure()

    def fetch(self, transfer: Transfer, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> BegunFetch:
        """``transfer.fetch``, recorded."""
        label = self._label(self._block_of.get(image.name))
        self._expect(slot.data_ptr(), label)
        started = time.perf_counter()
        with self._fetching.of(label):
            begun = transfer.fetch(image, slot, after)
        self.keep(QueueRecord(*label, started, time.perf_counter()))
        return begun

    def _label(self, block: int | None) -> Label:
        return block, None if block is None else self._fetch_of.get(block)

    def _expect(self, address: int, label: Label) -> None:
        self._labels[address] = label
        if address not in self._addresses:
            self._addresses = tuple(sorted((*self._addresses, address)))

    # From packing threads and from the loop

    def label_at(self, address: int) -> Label:
        addresses = self._addresses
        index = bisect.bisect_right(addresses, address)
        return self._labels[addresses[index - 1]] if index else (None, None)

    def copied(self, stream: str, label: Label, nbytes: int, begin: Mark, end: Mark) -> None:
        self.keep(CopyRecord(stream, *label, nbytes, begin, end))

    def gathered(self, stream: str, number: int, label: Label, nbytes: int, begin: Mark, end: Mark) -> None:
        self.keep(GatherRecord(stream, number, *label, nbytes, begin, end))

    def allocated(self, record: AllocationRecord) -> None:
        self.keep(record)

    # From compute threads

    def fetch_of(self, block: int) -> int | None:
        """The number of the fetch that brought ``block``, which is on the device now; None for a resident."""
        return self._fetch_of.get(block)

    def sample_memory(self) -> None:
        """Take note of the device's memory."""
        if self._device is None:
            return
        with suppress(RuntimeError):  # the device failed: whoever needs it is told
            now = self._device.memory()
            self.keep(MemoryRecord(time.perf_counter(), now.in_use, now.cached, now.free, now.num_retries))


class TracedTransfer:
    """A transfer whose fetches are recorded; all else is its own."""

    def __init__(self, inner: Transfer, engine: RecordedEngine) -> None:
        self._inner, self._engine = inner, engine

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def scratch_bytes(self) -> int:
        return self._inner.scratch_bytes

    @property
    def staging_bytes(self) -> int:
        return self._inner.staging_bytes

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> BegunFetch:
        return self._engine.fetch(self._inner, image, slot, after)

    def close(self) -> None:
        self._inner.close()


class _Watch:
    """Records what a place's thread does."""

    def __init__(self, place: Place, engine: RecordedEngine) -> None:
        self._place, self._engine = place, engine
        self._begun = self._entered = 0.0
        self._begin: Mark | None = None

    def pass_begun(self, pass_id: int) -> None:
        self._begun = time.perf_counter()

    def pass_ended(self, pass_id: int) -> None:
        self._engine.keep(PassRecord(self._place.index, pass_id, self._begun, time.perf_counter()))
        self._engine.sample_memory()

    def waited(self, kind: WaitKind, block: int | None, started: float) -> None:
        now = time.perf_counter()
        if kind != "event" or now - started >= LEAST_WAIT_S:
            self._engine.keep(WaitRecord(self._place.index, kind, block, started, now))

    def entered(self, pass_id: int, block: int) -> None:
        self._entered = time.perf_counter()
        self._begin = self._engine.clock.mark(self._place.stream)

    def left(self, pass_id: int, block: int) -> None:
        begin, engine = self._begin, self._engine
        if begin is not None:
            end = engine.clock.mark(self._place.stream)
            left, fetch = time.perf_counter(), engine.fetch_of(block)
            engine.keep(RunRecord(self._place.index, pass_id, block, fetch, self._entered, left, begin, end))


def _getter(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = FIELDS[kind.__name__]
    if "error" in names:
        return lambda event: tuple(repr(getattr(event, n)) if n == "error" else getattr(event, n) for n in names)
    if len(names) < 2:  # of which attrgetter makes no tuple
        return lambda event: tuple(getattr(event, name) for name in names)
    return attrgetter(*names)


#: What is kept of each event, by its kind: not the device events, which hold resources. Errors are kept as text.
FIELDS: dict[str, tuple[str, ...]] = {
    kind.__name__: tuple(field.name for field in attrs.fields(kind) if field.name != "event")
    for kind in get_args(ObservedEvent)
}
VALUES_OF: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {kind: _getter(kind) for kind in get_args(ObservedEvent)}
