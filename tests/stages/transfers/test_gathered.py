"""The gathered transfer: exact on every rank, in one order, and failing together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import attrs
import pytest
import torch

from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceStreamError, NotPageLockedError, SourceReadError, StreamflowError
from streamflow.stages.images import Piece
from streamflow.stages.opening import OpenTransfer
from streamflow.stages.ranks.errors import GatherError
from streamflow.stages.ranks.slices import GatherPlan, Run
from streamflow.stages.testing.blocks import ToyBlocks, in_pieces, toy_blocks
from streamflow.stages.testing.gather_trials import (
    RankUnderTest,
    draw_gather_trial,
    open_rank,
    page_locked,
    run_gather_trial,
)
from streamflow.stages.testing.pieces import FailingPiece, GatedPiece, WholePiece, WrappedPiece
from streamflow.stages.testing.queues import Machine
from streamflow.stages.testing.scripted_ranks import ScriptedRanks, UnlikeGathersError
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.trials import first_failure
from streamflow.stages.testing.walker import open_device
from streamflow.stages.threads import ThreadCrew, open_tasks, open_threads
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.transfers.gather_order import GatherOrder, Step
from streamflow.stages.transfers.gathered import StagingOptions, open_gathered
from streamflow.stages.transfers.rank_slices import Gatherer

pytestmark = pytest.mark.anyio

TWO_THREADS = StagingOptions(num_threads=2, chunk_bytes=512)
each_way = pytest.mark.parametrize("staged", [None, TWO_THREADS], ids=["direct", "staged"])


async def on_ranks(
    ranks: ScriptedRanks,
    blocks: Sequence[ToyBlocks],
    work: Callable[[int, RankUnderTest], Awaitable[None]],
    *,
    staged: StagingOptions | None = None,
    chunk_bytes: int = 1024,
    local: frozenset[str] = frozenset(),
) -> None:
    """Run ``work`` for each rank, by its number, on a cpu device of its own."""

    async def run_one(number: int) -> None:
        async with open_rank(
            CpuDevice(),
            blocks[number],
            ranks.communicators[number],
            window_slots=2,
            chunk_bytes=chunk_bytes,
            staged=staged,
            local=local,
        ) as rank:
            await work(number, rank)

    with anyio.fail_after(30):
        async with open_tasks() as task_group:
            for number in range(ranks.size):
                task_group.start_soon(run_one, number)


# Exactness, in any order of events


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
async def test_every_rank_sees_the_blocks_whatever_happens_when(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        trial = draw_gather_trial(seed)
        with anyio.fail_after(30):
            await run_gather_trial(trial)


@pytest.mark.slow
async def test_every_rank_sees_the_blocks_over_many_seeds() -> None:
    for seed in range(1000, 1060):
        with anyio.fail_after(30):
            await run_gather_trial(draw_gather_trial(seed))


def the_gather_does_not_wait_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    def queue(self: GatherOrder, step: Step) -> None:
        step.after = ()
        original(self, step)

    original = GatherOrder._queue
    patch.setattr(GatherOrder, "_queue", queue)


def the_fetch_ends_with_its_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gatherer, "end", lambda self: self.copies.record())


def gathers_are_queued_as_they_get_ready(patch: pytest.MonkeyPatch) -> None:
    def advance(self: GatherOrder) -> None:
        with self._lock:
            for step in [step for step in self._steps if not step.num_missing]:
                self._steps.remove(step)
                self._queue(step)

    patch.setattr(GatherOrder, "advance", advance)


def the_tail_is_left_to_others(patch: pytest.MonkeyPatch) -> None:
    def runs_of(self: GatherPlan, rank: int) -> tuple[Run, ...]:
        *slices, tail = original(self, rank)
        return (*slices, attrs.evolve(tail, nbytes=tail.nbytes if rank == 0 else 0))

    original = GatherPlan.runs_of
    patch.setattr(GatherPlan, "runs_of", runs_of)


@pytest.mark.parametrize(
    "plant",
    [
        the_gather_does_not_wait_for_the_copy,
        the_fetch_ends_with_its_copies,
        gathers_are_queued_as_they_get_ready,
        the_tail_is_left_to_others,
    ],
)
async def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    num_seeds = 100
    with anyio.fail_after(60), pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(num_seeds):
            try:
                await run_gather_trial(draw_gather_trial(seed))
            except StreamflowError:
                return
    pytest.fail(f"nothing was seen in {num_seeds} seeds")


# Exactness where communication blocks threads


def blocks_of(sizes: Sequence[Sequence[int]], num_ranks: int) -> list[ToyBlocks]:
    """The same blocks for each rank, each in memory of its own."""
    return [in_pieces(toy_blocks(sizes)) for _ in range(num_ranks)]


@each_way
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sizes", [[[5000], [1000]], [[1231 * 7], [239 * 7], [1]], [[0], [255, 257], [12_288]]])
async def test_blocks_of_unequal_sizes_are_exact_on_every_rank(
    sizes: list[list[int]], size: int, staged: StagingOptions | None
) -> None:
    blocks = blocks_of(sizes, size)
    order = list(range(len(sizes))) * 3

    async def work(number: int, rank: RankUnderTest) -> None:
        seen = await rank.fetch_in_order(blocks[number], order)
        assert [block for block, _ in seen] == order
        assert all(blocks[number].is_exact(block, image) for block, image in seen)

    await on_ranks(ScriptedRanks(size), blocks, work, staged=staged)


class CountedPiece(WrappedPiece):
    """Counts the bytes that are read of it."""

    num_read = 0

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        self.num_read += nbytes
        super().read_into(address, start, nbytes)


@each_way
async def test_a_rank_reads_its_share_and_no_more(staged: StagingOptions | None) -> None:
    pieces: list[list[CountedPiece]] = [[], [], []]

    def counted(number: int, block: int, piece: Piece) -> Piece:
        pieces[number].append(CountedPiece(piece))
        return pieces[number][-1]

    blocks = [in_pieces(toy_blocks([[7680], [300]]), partial(counted, number)) for number in range(3)]

    async def work(number: int, rank: RankUnderTest) -> None:
        seen = await rank.fetch_in_order(blocks[number], [0, 1])
        assert all(blocks[number].is_exact(block, image) for block, image in seen)

    await on_ranks(ScriptedRanks(3), blocks, work, staged=staged and StagingOptions(1, 512))
    # of 7,680 bytes a third; of 512, which are too few for three ranks, all
    assert [sum(piece.num_read for piece in read) for read in pieces] == [2560 + 300] * 3


@each_way
async def test_local_blocks_are_fetched_whole_and_without_the_others(staged: StagingOptions | None) -> None:
    ranks, blocks = ScriptedRanks(2), blocks_of([[5000], [1000]], 2)

    async def work(number: int, rank: RankUnderTest) -> None:
        before = ranks.num_gathers(number)
        order = [0] * (3 + number)
        seen = await rank.fetch_in_order(blocks[number], order)
        assert all(blocks[number].is_exact(block, image) for block, image in seen)
        assert ranks.num_gathers(number) == before
        seen = await rank.fetch_in_order(blocks[number], [1])
        assert blocks[number].is_exact(1, seen[0][1])
        assert ranks.num_gathers(number) > before

    await on_ranks(ranks, blocks, work, staged=staged, local=frozenset({"block 0"}))


@each_way
async def test_a_block_is_there_only_once_the_slowest_rank_has_brought_its_slice(staged: StagingOptions | None) -> None:
    ranks, blocks = ScriptedRanks(2), blocks_of([[4096]], 2)
    told = anyio.Event()

    async def work(number: int, rank: RankUnderTest) -> None:
        slot = rank.window[0].buffer.zero_()
        if number == 0:
            ranks.hold(1)
            told.set()
        await told.wait()
        fetching = rank.transfer.fetch(blocks[number].images[0], slot, ())
        event = await fetching.issued()
        rank.window[0].busy_until.append(event)
        if number == 0:
            await rank.crew.call(rank.copies.record().wait)
            assert not event.is_done()
            assert not blocks[0].is_exact(0, slot)
            ranks.release(1)
        await rank.crew.call(event.wait)
        assert blocks[number].is_exact(0, slot)

    await on_ranks(ranks, blocks, work, staged=staged)


# Failures


class Failing:
    """Blocks for each rank, of which one cannot be read on one rank."""

    def __init__(self, num_ranks: int, *, rank: int, block: int) -> None:
        self.rank, self.block = rank, block
        self.blocks = [self._blocks_of(number) for number in range(num_ranks)]

    def _blocks_of(self, number: int) -> ToyBlocks:
        def wrap(block: int, piece: Piece) -> Piece:
            return FailingPiece(piece, fails_at=1) if (number, block) == (self.rank, self.block) else piece

        return in_pieces(toy_blocks([[6000]] * 3), wrap)


def cause_of(failure: BaseException) -> BaseException:
    """What failed on the device."""
    return failure.cause if isinstance(failure, DeviceStreamError) else failure


@each_way
@pytest.mark.parametrize("failing_rank", [0, 1, 2])
async def test_a_source_that_fails_on_one_rank_fails_all_and_nothing_wrong_is_used(
    failing_rank: int, staged: StagingOptions | None
) -> None:
    failing, ranks = Failing(3, rank=failing_rank, block=1), ScriptedRanks(3)
    causes: dict[int, BaseException] = {}

    async def work(number: int, rank: RankUnderTest) -> None:
        try:
            await rank.fetch_in_order(failing.blocks[number], [0, 1, 2, 0])
        except Exception as failure:
            causes[number] = cause_of(failure)
            rank.transfer.close()
            ranks.communicators[number].abort()  # as the owner of the communicator does

    await on_ranks(ranks, failing.blocks, work, staged=staged)
    assert isinstance(causes.pop(failing_rank), SourceReadError)
    assert len(causes) == 2
    assert all(isinstance(cause, GatherError) for cause in causes.values())
    # block 0 and the first chunk of block 1 at most: what came after the failure was not gathered with anything else
    assert max(ranks.num_gathers(number) for number in range(3)) <= 1 + 6 + 6


@each_way
async def test_nothing_is_gathered_after_a_failure(staged: StagingOptions | None) -> None:
    failing, ranks = Failing(2, rank=0, block=1), ScriptedRanks(2)

    async def work(number: int, rank: RankUnderTest) -> None:
        with pytest.raises(Exception, match=r"the test wants it so|gather a block") as first:
            await rank.fetch_in_order(failing.blocks[number], [1])
        ranks.communicators[number].abort()
        gathered_before = ranks.num_gathers(number)
        for _ in range(3):
            with pytest.raises(Exception, match=r"the test wants it so|gather a block") as later:
                await rank.fetch_in_order(failing.blocks[number], [0])
            assert cause_of(later.value) is cause_of(first.value)
        assert ranks.num_gathers(number) == gathered_before

    await on_ranks(ranks, failing.blocks, work, staged=staged)


@each_way
@pytest.mark.parametrize("index", [1, 3])
async def test_a_gather_that_fails_on_one_rank_fails_all(index: int, staged: StagingOptions | None) -> None:
    ranks, blocks = ScriptedRanks(3), blocks_of([[6000]] * 3, 3)
    ranks.fail(1, index)
    causes: dict[int, BaseException] = {}

    async def work(number: int, rank: RankUnderTest) -> None:
        with pytest.raises(DeviceStreamError) as caught:
            await rank.fetch_in_order(blocks[number], [0, 1, 2])
        causes[number] = cause_of(caught.value)
        ranks.communicators[number].abort()

    await on_ranks(ranks, blocks, work, staged=staged)
    assert [type(causes[number]) for number in range(3)] == [GatherError] * 3
    assert "the test wants it so" in str(causes[1])
    assert "rank 1: GatherError" in str(causes[0])


@pytest.mark.parametrize("seed", range(5))
@each_way
async def test_a_failed_gather_never_yields_a_result_on_devices_that_run_behind(
    seed: int, staged: StagingOptions | None
) -> None:
    machine = Machine(seed)
    ranks, blocks = ScriptedRanks(2, machine=machine), blocks_of([[6000]] * 2, 2)
    ranks.fail(seed % 2, 4)

    async def run_one(number: int) -> None:
        async with open_rank(
            SimDevice(seed, machine=machine),
            page_locked(blocks[number]),
            ranks.communicators[number],
            window_slots=2,
            chunk_bytes=1024,
            staged=staged,
        ) as rank:
            with pytest.raises(DeviceStreamError):
                await rank.fetch_in_order(page_locked(blocks[number]), [0, 1, 0])
            ranks.communicators[number].abort()

    with anyio.fail_after(30):
        async with open_tasks() as task_group:
            for number in range(2):
                task_group.start_soon(run_one, number)


# Cancellation


class Gate:
    """Blocks for each rank, of which one is held back in its source on rank 0."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.blocks = [in_pieces(toy_blocks([[6000]] * 3), partial(self._wrap, number)) for number in range(2)]

    def _wrap(self, number: int, block: int, piece: Piece) -> Piece:
        return GatedPiece(piece, self.open, self.entered) if (number, block) == (0, 1) else piece


async def let_others_run() -> None:
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def test_a_cancelled_fetch_is_brought_to_its_end_so_that_no_rank_is_left_alone() -> None:
    gate, ranks = Gate(), ScriptedRanks(2)

    async def fetch_cancelled(rank: RankUnderTest) -> None:
        image, slot = gate.blocks[0].images[1], rank.window[1].buffer
        left = anyio.Event()
        scope = anyio.CancelScope()

        async def fetch() -> None:
            with scope:
                await rank.transfer.fetch(image, slot, ()).issued()
            left.set()

        async with open_tasks() as task_group:
            task_group.start_soon(fetch)
            await anyio.to_thread.run_sync(gate.entered.wait)
            scope.cancel()
            await let_others_run()
            assert not left.is_set()
            gate.open.set()
        assert scope.cancelled_caught
        await rank.crew.call(rank.copies.record().wait)  # who drains the copy stream drains the gathers, too
        assert gate.blocks[0].is_exact(1, slot)

    async def work(number: int, rank: RankUnderTest) -> None:
        if number == 0:
            await fetch_cancelled(rank)
            rest = [2, 0]
        else:
            rest = [1, 2, 0]
        seen = await rank.fetch_in_order(gate.blocks[number], rest)
        assert [block for block, _ in seen] == rest
        assert all(gate.blocks[number].is_exact(block, image) for block, image in seen)

    await on_ranks(ranks, gate.blocks, work, staged=TWO_THREADS)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancels_do_not_leave_packing_threads_with_a_slot() -> None:
    gate, ranks = Gate(), ScriptedRanks(2)

    async def work(number: int, rank: RankUnderTest) -> None:
        fetching = rank.transfer.fetch(gate.blocks[number].images[1], rank.window[0].buffer, ())
        if number == 1:
            await rank.crew.call((await fetching.issued()).wait)
            return
        task = asyncio.get_running_loop().create_task(fetching.issued())  # type: ignore[arg-type]
        await anyio.to_thread.run_sync(gate.entered.wait)
        for _ in range(3):
            task.cancel()
            await let_others_run()
            assert not task.done()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rank.crew.call(rank.copies.record().wait)
        assert gate.blocks[0].is_exact(1, rank.window[0].buffer)

    await on_ranks(ranks, gate.blocks, work, staged=TWO_THREADS)


# Opening


async def open_on(device: Device, blocks: ToyBlocks, ranks: ScriptedRanks, **options: object) -> None:
    """Open rank 0's transfer, expecting it to fail."""
    async with open_device(device) as crew:
        await open_gathered(
            device,
            device.open_copy_stream("copy"),
            crew,
            list(blocks.images.values()),
            ranks.communicators[0],
            **{"chunk_bytes": 1024, "staged": None, **options},  # type: ignore[arg-type]
        )


async def test_opening_without_the_others_fails_and_leaves_nothing() -> None:
    device = CpuDevice()
    with pytest.raises(GatherError, match="rank 1: it did not come in time"):
        await open_on(device, toy_blocks([[1000]]), ScriptedRanks(2, timeout_s=0.05))
    assert device.memory().in_use == 0


async def test_a_cancelled_opening_gives_up_and_the_others_are_told() -> None:
    device, ranks = CpuDevice(), ScriptedRanks(2)
    with anyio.fail_after(20):
        async with open_tasks() as task_group:
            task_group.start_soon(partial(open_on, device, toy_blocks([[1000]]), ranks))
            await anyio.to_thread.run_sync(ranks.wait_until, lambda: ranks.num_gathers(0) == 1)
            task_group.cancel_scope.cancel()
        assert device.memory().in_use == 0
        bytes_of_both = torch.zeros(2, dtype=torch.uint8)
        ranks.communicators[1].gather(bytes_of_both, 1)  # its byte was there already
        with pytest.raises(GatherError, match="rank 0: it was given up there"):
            ranks.communicators[1].gather(bytes_of_both, 1)


async def test_what_cannot_be_gathered_is_refused_before_any_gather() -> None:
    ranks = ScriptedRanks(2)
    whole = in_pieces(toy_blocks([[1000]] * 2), lambda block, piece: WholePiece(piece) if block else piece)
    with pytest.raises(ValueError, match="block 1: their pieces can be read only as a whole"):
        await open_on(CpuDevice(), whole, ranks)
    with pytest.raises(ValueError, match="block 7: there are no such blocks"):
        await open_on(CpuDevice(), whole, ranks, local={"block 1", "block 7"})
    assert ranks.num_gathers(0) == 0


async def test_pageable_memory_is_refused_by_direct_slices_of_an_accelerator_and_breaks_the_order() -> None:
    machine = Machine(0)
    device, ranks, blocks = SimDevice(0, machine=machine), ScriptedRanks(1, machine=machine), toy_blocks([[1000]] * 2)
    locked = page_locked(toy_blocks([[1000]] * 2))
    async with open_rank(device, blocks, ranks.communicators[0], window_slots=1, chunk_bytes=1024) as rank:
        for image in (blocks.images[0], locked.images[1]):
            with pytest.raises(NotPageLockedError, match="block 0 is not page-locked"):
                rank.transfer.fetch(image, rank.window[0].buffer, ())
        await rank.crew.call(rank.drain)


# The scripted ranks themselves


async def test_gathers_out_of_order_are_seen_by_their_sizes() -> None:
    ranks = ScriptedRanks(2)
    async with open_threads() as crew, open_tasks() as task_group:
        for communicator, nbytes in zip(ranks.communicators, (256, 512), strict=True):
            target = torch.zeros(2 * nbytes, dtype=torch.uint8)
            task_group.start_soon(partial(refused, crew, partial(communicator.gather, target, nbytes)))


async def refused(crew: ThreadCrew, gather: Callable[[], None]) -> None:
    with pytest.raises(UnlikeGathersError, match=r"gather 0 has slices of .*256.* bytes, by rank") as caught:
        await crew.call(gather)
    assert caught.value.sizes == {0: 256, 1: 512}


# In an engine


@each_way
async def test_an_engine_streams_exactly_by_it_whatever_happens_when(staged: StagingOptions | None) -> None:
    """One rank alone gathers, too, from itself: what is tested is how the transfer and the engine go together."""

    def open_for(blocks: ToyBlocks) -> OpenTransfer:
        async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
            images = list(page_locked(blocks).images.values())
            (communicator,) = ScriptedRanks(1).communicators
            transfer = await open_gathered(
                device, stream, crew, images, communicator, chunk_bytes=512, staged=staged, local=[images[0].name]
            )
            locked = {image.name: image for image in images}
            fetch = transfer.fetch
            transfer.fetch = lambda image, slot, after: fetch(locked[image.name], slot, after)  # type: ignore[method-assign]
            return transfer

        return open_it

    with anyio.fail_after(60):
        assert await first_failure(range(20), open_for) is None
