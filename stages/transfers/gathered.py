"""Gathered transfer: each rank copies its slice of a block over its own host link, and the ranks gather the rest.

The copy stream copies this rank's slice of each chunk straight into its place in the slot; once it is there, the
communication stream gathers the chunk in place, while the next chunk is being copied. There is no device scratch.
"""

from __future__ import annotations

import bisect
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import attrs
import torch

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.errors import DeviceStreamError, NotPageLockedError
from streamflow.stages.images import BlockImage
from streamflow.stages.ranks.communicator import Communicator
from streamflow.stages.ranks.slices import Clip, GatherChunk, GatherPlan, Run, cannot_be_cut, clip, plan_gather
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import ThreadCrew, wait_through
from streamflow.stages.timing import OnPacked
from streamflow.stages.transfers.base import Fetching, Issued, Transfer
from streamflow.stages.transfers.chunks import Chunk
from streamflow.stages.transfers.direct import DirectTransfer, queue_copy
from streamflow.stages.transfers.gather_order import GatherOrder, Step
from streamflow.stages.transfers.staged import StagedTransfer, open_staged


@attrs.frozen
class StagingOptions:
    """How slices of pageable memory are packed: as `open_staged` has it."""

    num_threads: int
    chunk_bytes: int
    on_packed: OnPacked | None = None


class _Slices(Protocol):
    """A way in which this rank's slices get into slots."""

    def fetch(self, image: BlockImage, plan: GatherPlan, slot: torch.Tensor, after: Sequence[Event]) -> Fetching:
        """Begin to bring the slices of ``image`` into ``slot``, and announce its gathers."""


class GatheredTransfer:
    """Slices from the host, the rest from the other ranks. Made by `open_gathered`.

    Every rank fetches the same images in the same order. Once a fetch failed on this rank, no gather is queued any more
    and every later fetch of a gathered block fails alike.
    """

    name = "gathered"
    scratch_bytes = 0

    def __init__(self, plans: Mapping[str, GatherPlan], slices: _Slices, whole: Transfer, order: GatherOrder) -> None:
        self._plans = plans
        self._slices = slices
        self._whole = whole
        self._order = order

    @property
    def plans(self) -> Mapping[str, GatherPlan]:
        """How each gathered image is cut, by its name; equal on all ranks. The other images are fetched whole."""
        return self._plans

    @property
    def staging_bytes(self) -> int:
        return self._whole.staging_bytes

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> Fetching:
        """Begin to bring ``image`` into ``slot``: as a whole if it is local, else together with the other ranks.

        A fetch that has begun goes on when it is cancelled, so that no rank is left alone in a gather.

        :raises NotPageLockedError: if the device cannot read the image where it lies (direct slices).
        :raises Exception: what an earlier fetch failed with.
        """
        plan = self._plans.get(image.name)
        if plan is None:
            return self._whole.fetch(image, slot, after)
        if self._order.failure is not None:
            raise self._order.failure
        return self._slices.fetch(image, plan, slot, after)

    def close(self) -> None:
        """Free what it holds; the communicator is its owner's. Idempotent."""
        self._whole.close()


@attrs.frozen
class _Gatherer:
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


class _DirectSlices:
    """Runs of memory that the device reads at full speed, queued at once."""

    def __init__(
        self, gatherer: _Gatherer, clips: Mapping[str, Sequence[Sequence[Clip]]], *, reads_any_memory: bool
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

    def __init__(self, gatherer: _Gatherer) -> None:
        self._gatherer = gatherer
        self.event: Event | None = None

    def reach(self) -> None:
        self.event = self._gatherer.end()


class _StagedSlices:
    """Slices that several threads pack into page-locked buffers."""

    def __init__(self, gatherer: _Gatherer, packers: StagedTransfer, step_of: Mapping[str, Sequence[int]]) -> None:
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

    def __init__(self, gatherer: _Gatherer, step_of: Sequence[int]) -> None:
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


async def open_gathered(
    device: Device,
    stream: Stream,
    crew: ThreadCrew,
    images: Sequence[BlockImage],
    communicator: Communicator,
    *,
    chunk_bytes: int,
    staged: StagingOptions | None,
    local: Collection[str] = (),
) -> GatheredTransfer:
    """A gathered transfer for ``images``, which copies slices on ``stream`` and gathers on a stream of its own.

    Every rank of ``communicator``, which stays the caller's, has to open one, with images of the same names and sizes
    in the same order, and the same ``chunk_bytes`` and ``local``. It returns once all have met, so that what a first
    gather costs, or fails of, is not a pass's. ``chunk_bytes``: of what is gathered at once, from all ranks together.
    ``staged``: how slices are packed; None: they are copied directly. ``local``: names of images that every rank
    fetches whole. A cancelled call aborts the communicator.

    :raises ValueError: if ``local`` names an image that is not there, or an image cannot be cut.
    :raises HostRegistrationError: if staging buffers cannot be page-locked; nothing is held then.
    :raises GatherError: if the ranks do not meet; nothing is held then.
    """
    gathered = _gathered(images, local)
    plans = {image.name: plan_gather(image.nbytes, communicator.size, chunk_bytes) for image in gathered}
    order = GatherOrder(device.open_communication_stream("communication"))
    gatherer = _Gatherer(communicator, order, stream)
    if any(plan.chunks for plan in plans.values()):  # else there is nothing to meet for
        await crew.call(partial(_meet, device, gatherer), on_cancel=communicator.abort, name="first gather")
    runs = {name: plan.runs_of(communicator.rank) for name, plan in plans.items()}
    if staged is None:
        clips = {image.name: clip(image.pieces, runs[image.name]) for image in gathered}
        slices = _DirectSlices(gatherer, clips, reads_any_memory=device.is_host)
        return GatheredTransfer(plans, slices, DirectTransfer(stream, reads_any_memory=device.is_host), order)
    packers = await open_staged(
        device,
        stream,
        crew,
        images,
        num_threads=staged.num_threads,
        chunk_bytes=staged.chunk_bytes,
        on_packed=staged.on_packed,
        runs=runs,
    )
    step_of = {image.name: _steps_of(packers.chunks_of(image), runs[image.name]) for image in gathered}
    return GatheredTransfer(plans, _StagedSlices(gatherer, packers, step_of), packers, order)


def _steps_of(chunks: Sequence[Chunk], runs: Sequence[Run]) -> list[int]:
    """For each of ``chunks`` which of ``runs``, by ascending offset, it lies in."""
    ends = [run.end for run in runs]
    return [bisect.bisect_right(ends, chunk.image_offset) for chunk in chunks]


def _gathered(images: Sequence[BlockImage], local: Collection[str]) -> list[BlockImage]:
    unknown = sorted(set(local) - {image.name for image in images})
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: there are no such blocks to fetch whole")
    gathered = [image for image in images if image.name not in local]
    whole = sorted(cannot_be_cut(gathered))
    if whole:
        raise ValueError(
            f"{', '.join(whole)}: their pieces can be read only as a whole, so no rank can bring a slice of them; "
            "let every rank fetch these blocks whole (local)"
        )
    return gathered


def _meet(device: Device, gatherer: _Gatherer) -> None:
    """Gather a byte from each rank."""
    buffer = device.allocate(gatherer.communicator.size)
    try:
        gatherer.queue(buffer, GatherChunk(0, 1))
        gatherer.order.stream.record().wait()
    except DeviceStreamError as failure:
        raise failure.cause from failure
    finally:
        device.free(buffer)
