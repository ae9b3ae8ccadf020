"""Gathered transfer: each rank copies its slice of a block over its own host link, and the ranks gather the rest.

The copy stream copies this rank's slice of each chunk straight into its place in the slot; once it is there, the
communication stream gathers the chunk in place, while the next chunk is being copied. There is no device scratch.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import attrs
import torch

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.errors import DeviceStreamError
from streamflow.stages.images import BlockImage
from streamflow.stages.ranks.communicator import Communicator
from streamflow.stages.ranks.slices import GatherChunk, GatherPlan, Run, cannot_be_cut, clip, plan_gather
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.timing import OnPacked
from streamflow.stages.transfers.base import Fetching, Transfer
from streamflow.stages.transfers.chunks import Chunk
from streamflow.stages.transfers.direct import DirectTransfer
from streamflow.stages.transfers.gather_order import GatherOrder
from streamflow.stages.transfers.rank_slices import DirectSlices, Gatherer, Slices, StagedSlices
from streamflow.stages.transfers.staged import open_staged


@attrs.frozen
class StagingOptions:
    """How slices of pageable memory are packed: as `open_staged` has it."""

    num_threads: int
    chunk_bytes: int
    on_packed: OnPacked | None = None


class GatheredTransfer:
    """Slices from the host, the rest from the other ranks. Made by `open_gathered`.

    Every rank fetches the same images in the same order. Once a fetch failed on this rank, no gather is queued any more
    and every later fetch of a gathered block fails alike.
    """

    name = "gathered"
    scratch_bytes = 0

    def __init__(self, plans: Mapping[str, GatherPlan], slices: Slices, whole: Transfer, order: GatherOrder) -> None:
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
    gatherer = Gatherer(communicator, order, stream)
    if any(plan.chunks for plan in plans.values()):  # else there is nothing to meet for
        await crew.call(partial(_meet, device, gatherer), on_cancel=communicator.abort, name="first gather")
    runs = {name: plan.runs_of(communicator.rank) for name, plan in plans.items()}
    if staged is None:
        clips = {image.name: clip(image.pieces, runs[image.name]) for image in gathered}
        slices = DirectSlices(gatherer, clips, reads_any_memory=device.is_host)
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
    return GatheredTransfer(plans, StagedSlices(gatherer, packers, step_of), packers, order)


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


def _meet(device: Device, gatherer: Gatherer) -> None:
    """Gather a byte from each rank."""
    buffer = device.allocate(gatherer.communicator.size)
    try:
        gatherer.queue(buffer, GatherChunk(0, 1))
        gatherer.order.stream.record().wait()
    except DeviceStreamError as failure:
        raise failure.cause from failure.cause.__cause__  # not from what it is itself the cause of
    finally:
        device.free(buffer)
