"""Trials of gathered transfers: several ranks on sim devices of one machine, everything drawn from one seed.

Each rank fetches the same blocks into its slots in one order. Whoever uses a slot reads it on a compute stream after
the fetch's event, and the refill waits for that. Which copies, gathers and reads happen when is the seed's.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import attrs
import torch

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.errors import DeviceStreamError
from streamflow.stages.images import BlockImage, MemoryPiece
from streamflow.stages.ranks.communicator import Communicator
from streamflow.stages.slots import Window
from streamflow.stages.testing.blocks import ToyBlocks, in_pieces, toy_blocks
from streamflow.stages.testing.queues import Machine
from streamflow.stages.testing.scripted_ranks import ScriptedRanks
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.walker import WrongBytesError, open_device
from streamflow.stages.threads import ThreadCrew, open_tasks
from streamflow.stages.transfers.base import Fetching, Transfer
from streamflow.stages.transfers.gathered import StagingOptions, open_gathered


@attrs.frozen(eq=False)
class GatherTrial:
    """``order``: blocks as every rank fetches them. ``staged``: None: slices are copied directly."""

    seed: int
    size: int
    blocks: ToyBlocks
    order: tuple[int, ...]
    window_slots: int
    chunk_bytes: int
    staged: StagingOptions | None
    local: frozenset[str]

    def __str__(self) -> str:
        sizes = [image.nbytes for image in self.blocks.images.values()]
        return (
            f"seed {self.seed}: {self.size} ranks, images of {sizes} bytes, fetched in order {self.order} into "
            f"{self.window_slots} slots, chunks of {self.chunk_bytes}, {self.staged}, whole: {sorted(self.local)}"
        )


def draw_gather_trial(seed: int) -> GatherTrial:
    """Two to four ranks, one to six blocks of unequal sizes, whole or in pieces, most of them gathered."""
    draw = random.Random(seed)
    size = draw.choice((2, 2, 3, 4))
    sizes = [
        [draw.choice((0, 1, 100, 256, 700, 3000, 9000)) for _ in range(draw.randint(1, 4))]
        for _ in range(draw.randint(1, 6))
    ]
    blocks = page_locked(toy_blocks(sizes, seed))
    if draw.random() < 0.5:
        blocks = in_pieces(blocks, lambda block, piece: attrs.evolve(piece, page_locked=True))  # type: ignore[misc]
    staged = StagingOptions(draw.randint(1, 3), draw.choice((256, 512, 1000))) if draw.random() < 0.5 else None
    return GatherTrial(
        seed,
        size,
        blocks,
        tuple(draw.choices(list(blocks.images), k=draw.randint(1, 10))),
        draw.randint(1, 3),
        draw.choice((256, 1024, 4096, 1 << 20)),
        staged,
        frozenset(image.name for image in blocks.images.values() if draw.random() < 0.2),
    )


def page_locked(blocks: ToyBlocks) -> ToyBlocks:
    """The same blocks, in memory that is said to be page-locked: sim devices read any."""

    def lock(image: BlockImage) -> BlockImage:
        pieces = [attrs.evolve(p, page_locked=True) if isinstance(p, MemoryPiece) else p for p in image.pieces]
        return BlockImage(image.name, image.layout, tuple(pieces))

    return ToyBlocks({block: lock(image) for block, image in blocks.images.items()}, blocks.expected)


@attrs.frozen(eq=False)
class RankUnderTest:
    """One rank: its device, streams and transfer, and slots that are poisoned when they are freed."""

    device: Device
    crew: ThreadCrew
    copies: Stream
    transfer: Transfer
    window: Window
    compute: Stream

    async def fetch_in_order(self, blocks: ToyBlocks, order: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """Fetch the blocks, each into the next slot, as many at once as there are slots; returns what compute saw.

        :raises BaseException: what a fetch, or the device, failed with.
        """
        seen: list[tuple[int, torch.Tensor]] = []
        under_way: deque[tuple[int, int, Fetching]] = deque()
        try:
            for serial, block in enumerate(order):
                if len(under_way) == len(self.window):
                    await self._use(blocks, *under_way.popleft(), seen)
                under_way.append(self._begin(blocks, block, serial))
            while under_way:
                await self._use(blocks, *under_way.popleft(), seen)
        finally:
            await self.crew.call_through(self.drain)
        return seen

    def _begin(self, blocks: ToyBlocks, block: int, serial: int) -> tuple[int, int, Fetching]:
        index = serial % len(self.window)
        after = self.window.refill(index, block, serial, self.copies)
        return block, index, self.transfer.fetch(blocks.images[block], self.window[index].buffer, after)

    async def _use(
        self, blocks: ToyBlocks, block: int, index: int, fetching: Fetching, seen: list[tuple[int, torch.Tensor]]
    ) -> None:
        slot = self.window[index]
        event = fetching.event if fetching.event is not None else await fetching.issued()
        slot.busy_until.append(event)
        image = slot.buffer[: blocks.images[block].nbytes]
        await self.crew.call(partial(self._compute, block, image, event, seen))
        slot.busy_until.append(self.compute.record())

    def _compute(self, block: int, image: torch.Tensor, event: Event, seen: list[tuple[int, torch.Tensor]]) -> None:
        self.compute.wait(event)  # on a host device it waits here
        self.compute.submit(lambda: seen.append((block, image.clone())))

    def drain(self) -> None:
        """Wait until the device is done with everything; blocks.

        :raises DeviceStreamError: if some of it failed.
        """
        events = [event for slot in self.window for event in slot.busy_until]
        failures: list[DeviceStreamError] = []
        for event in (self.copies.record(), self.compute.record(), *events):
            try:
                event.wait()
            except DeviceStreamError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]


@asynccontextmanager
async def open_rank(
    device: Device,
    blocks: ToyBlocks,
    communicator: Communicator,
    *,
    window_slots: int,
    chunk_bytes: int,
    staged: StagingOptions | None = None,
    local: frozenset[str] = frozenset(),
) -> AsyncIterator[RankUnderTest]:
    """A rank on ``device``, which it opens and closes."""
    async with open_device(device) as crew, AsyncExitStack() as stack:
        copies = device.open_copy_stream("copy")
        images = list(blocks.images.values())
        transfer = await open_gathered(
            device, copies, crew, images, communicator, chunk_bytes=chunk_bytes, staged=staged, local=local
        )
        stack.callback(transfer.close)
        window = Window(device, window_slots, blocks.largest, poison=True)
        stack.callback(window.close)
        yield RankUnderTest(device, crew, copies, transfer, window, device.open_compute_stream("compute"))


async def run_gather_trial(trial: GatherTrial) -> None:
    """Run the trial on all its ranks. One that fails aborts its communicator, as its owner would.

    :raises WrongBytesError: if a rank saw other bytes than a block's; ``visits`` has the rank, 0, and the block.
    :raises BaseException: what the first rank to fail met.
    """
    machine = Machine(trial.seed)
    ranks = ScriptedRanks(trial.size, machine=machine)
    wrong: list[tuple[int, int, int]] = []

    async def run_rank(communicator: Communicator) -> None:
        async with open_rank(
            SimDevice(trial.seed, machine=machine),
            trial.blocks,
            communicator,
            window_slots=trial.window_slots,
            chunk_bytes=trial.chunk_bytes,
            staged=trial.staged,
            local=trial.local,
        ) as rank:
            try:
                seen = await rank.fetch_in_order(trial.blocks, trial.order)
            except BaseException:
                communicator.abort()
                raise
        if [block for block, _ in seen] != list(trial.order):
            raise WrongBytesError([(communicator.rank, 0, block) for block in trial.order])
        wrong.extend((communicator.rank, 0, b) for b, image in seen if not trial.blocks.is_exact(b, image))

    async with open_tasks() as task_group:
        for communicator in ranks.communicators:
            task_group.start_soon(run_rank, communicator)
    if wrong:
        raise WrongBytesError(wrong)
