"""A residency over toy components: one block each, whose bytes whoever has a lease can check."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import attrs
import torch

from streamflow.stages.devices.base import Device
from streamflow.stages.movables import Movable
from streamflow.stages.observers import Broadcast
from streamflow.stages.places import Place
from streamflow.stages.residency import Residency
from streamflow.stages.residency_opening import open_residency
from streamflow.stages.signals import LoopEvent
from streamflow.stages.testing.binder import RecordingBinder
from streamflow.stages.testing.blocks import ToyBlocks
from streamflow.stages.testing.walker import WrongBytesError, open_device
from streamflow.stages.threads import ThreadCrew, wait_through
from streamflow.stages.transfers.direct import DirectTransfer

RUN_AHEAD = 4


@attrs.define(eq=False)
class Visits:
    """What one place did: the components it visits, and what the device saw of each."""

    place: Place
    done: LoopEvent
    seen: list[tuple[int, list[torch.Tensor]]] = attrs.field(factory=list)
    failure: BaseException | None = None


@attrs.define(eq=False)
class Residents:
    """A residency, its places, and what failed. ``inside``: called in the compute thread, with place and block."""

    residency: Residency
    broadcast: Broadcast
    blocks: ToyBlocks
    binder: RecordingBinder
    places: list[Place]
    failures: list[BaseException]
    crew: ThreadCrew
    busy: bool = False
    inside: Callable[[Place, int], None] = lambda place, block: None

    async def run(self, *routes: Sequence[int], keep: bool = False, first_place: int = 0) -> None:
        """Visit components by their block, one route for each place from ``first_place`` on.

        :raises WrongBytesError: if a component had other bytes than its own.
        :raises BaseException: what the first place to fail met.
        """
        visits = [Visits(place, LoopEvent()) for place in self.places[first_place:][: len(routes)]]
        for visit, route in zip(visits, routes, strict=True):
            visit.place.mailbox.reset()
            visit.place.thread.submit(partial(self._work, visit, route, keep))
        absorbed = [await wait_through(visit.done) for visit in visits]
        for failure in (*absorbed, *(visit.failure for visit in visits)):
            if failure is not None:
                raise failure
        wrong = [
            (visit.place.index, 0, block)
            for visit in visits
            for block, copies in visit.seen
            if len(copies) != 1 or not self.blocks.is_exact(block, copies[0])
        ]
        if wrong:
            raise WrongBytesError(wrong)

    def _work(self, visit: Visits, route: Sequence[int], keep: bool) -> None:
        try:
            for block in route:
                self._visit(visit, block, keep)
        except BaseException as failure:
            visit.failure = failure
        finally:
            visit.place.settle()
            visit.done.set()

    def _visit(self, visit: Visits, block: int, keep: bool) -> None:
        self.residency.ask(visit.place, str(block), keep=keep)
        try:
            image = self.binder.buffer_of(block)[: self.blocks.images[block].nbytes]
            copies: list[torch.Tensor] = []
            visit.place.stream.submit(lambda: copies.append(image.clone()))
            visit.seen.append((block, copies))
            self.inside(visit.place, block)
        finally:
            self.residency.release(visit.place, str(block))


@asynccontextmanager
async def open_residents(
    device: Device, blocks: ToyBlocks, *, budget_bytes: int | None = None, num_places: int = 1
) -> AsyncIterator[Residents]:
    """Residents on ``device``, which this opens and closes; nothing may be left on it.

    :raises AssertionError: if something is.
    """
    binder = RecordingBinder()
    async with open_device(device) as crew:
        movables = [Movable(str(block), {block: image}, binder, device) for block, image in blocks.images.items()]
        places = [
            Place(i, device.open_compute_stream(f"compute {i}"), crew.start(f"streamflow place {i}"), RUN_AHEAD)
            for i in range(num_places)
        ]
        broadcast = Broadcast()
        failures: list[BaseException] = []
        async with open_residency(
            movables,
            budget_bytes=budget_bytes,
            device=device,
            transfer=DirectTransfer(device.open_copy_stream("copy"), reads_any_memory=True),
            crew=crew,
            broadcast=broadcast,
            is_busy=lambda: residents.busy,
            fail=failures.append,
        ) as residency:
            residents = Residents(residency, broadcast, blocks, binder, places, failures, crew)
            yield residents
        assert binder.bound == {}
        assert device.memory().in_use == 0
