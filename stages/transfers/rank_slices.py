"""How a rank's slices of a block get into a slot, and its gathers into their order: directly, or packed by threads."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import attrs
import torch

from streamflow.stages.devices.base import Event, Stream
from streamflow.stages.errors import DeviceStreamError, NotPageLockedError
from streamflow.stages.images import BlockImage
from streamflow.stages.ranks.communicator import Communicator
from streamflow.stages.ranks.slices import Clip, GatherChunk, GatherPlan
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import wait_through
from streamflow.stages.transfers.base import Fetching, Issued
from streamflow.stages.transfers.direct import queue_copy
from streamflow.stages.transfers.gather_order import GatherOrder, Step
from streamflow.stages.transfers.staged import StagedTransfer


class Slices(Protocol):
    """A way in which this rank's slices get into slots."""

    def fetch(self, image: BlockImage, plan: GatherPlan, slot: torch.Tensor, after: Sequence[Event]) -> Fetching:
        """Begin to bring the slices of ``image`` into ``slot``, and announce its gathers."""


@attrs.frozen
class Gatherer:
    """What fetches of either way have in common: this rank's place among the others, and the two streams."""

    communicator: Communicator
    order: GatherOrder
    copies: Stream

    def queue(self, slot: torch.Tensor, chunk: GatherChunk) -> None:
        """Queue the gather of one chunk."""
        nbytes = chunk.slice_bytes * self.communicator.size
        target = slot[chunk.image_offset : chunk.image_offset + nbytes]
        work = partial(self.communicator.gather, target, chunk.slice_bytes)
        self.order.stream.submit(work, nbytes - chunk.slice_bytes)

    def steps(self, plan: GatherPlan, slot: torch.Tensor, after: Sequence[Event]) -> list[Step]:
        """A step for each chunk, none of which misses anything yet."""
        return [Step(partial(self.queue, slot, chunk), 0, after) for chunk in plan.chunks]

    def end(self) -> Event:
        """What happens when all is there that was queued up to now."""
        return self.order.stream.record()

    def join(self) -> None:
        """Let the copy stream, and who drains it, wait for all gathers queued so far."""
        with suppress(DeviceStreamError):
            self.copies.wait(self.order.stream.record())


class DirectSlices:
    """Runs of memory that the device reads at full speed, queued at once."""

    def __init__(
        self, gatherer: Gatherer, clips: Mapping[str, Sequence[Sequence[Clip]]], *, reads_any_memory: bool
    ) -> None:
        self._gatherer = gatherer
        self._order = gatherer.order
        self._copies = gatherer.copies
        self._clips = clips
        self._reads_any_memory = reads_any_memory

    def fetch(self, image: BlockImage, plan: GatherPlan, slot: torch.Tensor, after: Sequence[Event]) -> Fetching:
        end = _End(self._gatherer)
        steps = [*self._gatherer.steps(plan, slot, after), Step(end.reach, 0, after)]
        try:
            self._queue_copies(image, slot, steps, after)
        except BaseException as failure:
            self._order.break_off(failure)
        else:
            self._order.announce(steps)
            self._order.advance()
        if end.event is None:
            raise self._given_up()
        return Issued(end.event)

    def _queue_copies(
        self, image: BlockImage, slot: torch.Tensor, steps: Sequence[Step], after: Sequence[Event]
    ) -> None:
        if not (self._reads_any_memory or image.page_locked):
            raise NotPageLockedError(image.name)
        for event in after:
            self._copies.wait(event)
        with self._copies.activate():
            for clips, step in zip(self._clips[image.name], steps, strict=True):
                for part in clips:
                    queue_copy(self._copies, image.pieces[part.piece], slot, part.start, part.nbytes)
                step.after = (self._copies.record(),)

    def _given_up(self) -> BaseException:
        self._gatherer.join()
        failure = self._order.failure
        if failure is None:
            raise RuntimeError("a fetch was given up without a failure")  # pragma: no cover - its steps were ready
        # it may be kept for as long as its offload, and the views in its frames would keep the source mapped
        traceback.clear_frames(failure.__traceback__)
        return failure


class _End:
    """The end of an image: its last step records the event."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self.event: Event | None = None

    def reach(self) -> None:
        self.event = self._gatherer.end()


class StagedSlices:
    """Slices that several threads pack into page-locked buffers."""

    def __init__(self, gatherer: Gatherer, packers: StagedTransfer, step_of: Mapping[str, Sequence[int]]) -> None:
        self._gatherer = gatherer
        self._packers = packers
        self._step_of = step_of

    def fetch(self, image: BlockImage, plan: GatherPlan, slot: torch.Tensor, after: Sequence[Event]) -> Fetching:
        step_of = self._step_of[image.name]
        gathering = _StagedGathering(self._gatherer, step_of)
        gathering.steps = [
            *self._gatherer.steps(plan, slot, after),
            Step(gathering.reach_end, 0, after, drop=gathering.give_up),
        ]
        for index in step_of:
            gathering.steps[index].num_missing += 1
        self._gatherer.order.announce(gathering.steps)
        self._packers.pack(image, slot, after, gathering)
        return gathering


class _StagedGathering:
    """An image of which threads pack slices; it is issued once they are through and its gathers queued or given up."""

    def __init__(self, gatherer: Gatherer, step_of: Sequence[int]) -> None:
        self._gatherer = gatherer
        self._order = gatherer.order
        self._step_of = step_of
        self.steps: Sequence[Step] = ()
        self._lock = threading.Lock()
        self._num_open = 2  # the packing, and the last step
        self._over = LoopEvent()
        self._end: Event | None = None

    event = None  # until then: it takes threads

    def copied(self, index: int) -> None:
        self._order.come(self.steps[self._step_of[index]], self._gatherer.copies.record)

    def packed(self, failure: BaseException | None) -> None:
        if failure is None:
            self._order.advance()  # steps that nothing was packed for
        else:
            self._order.break_off(failure)
        self._close_one()

    def reach_end(self) -> None:
        self._end = self._gatherer.end()
        self._close_one()

    def give_up(self) -> None:
        self._close_one()

    def _close_one(self) -> None:
        with self._lock:
            self._num_open -= 1
            is_over = not self._num_open
        if is_over:
            self.steps = ()  # they hold the slot, and this may stay in a traceback
            self._over.set()

    async def issued(self) -> Event:
        try:
            await self._over.wait()
        except BaseException:
            await wait_through(self._over)
            self._gatherer.join()
            raise
        if self._end is None:
            self._gatherer.join()
            raise self._order.failure or RuntimeError("a fetch was given up without a failure")
        return self._end
