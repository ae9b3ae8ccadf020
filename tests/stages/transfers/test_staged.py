"""The staged transfer: chunks, errors, cancellation, page locks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuCopyStream, CpuDevice
from streamflow.stages.errors import EngineBrokenError, HostRegistrationError, SourceReadError
from streamflow.stages.events import EngineFailed, FetchFailed
from streamflow.stages.images import MemoryPiece, Piece
from streamflow.stages.opening import EngineOptions
from streamflow.stages.testing.blocks import ToyBlocks, in_pieces, toy_blocks
from streamflow.stages.testing.held import HeldCpuDevice
from streamflow.stages.testing.pieces import FailingPiece, GatedPiece, WholePiece
from streamflow.stages.testing.queues import SimLeftoverError
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.walker import open_device, open_staged, open_walker
from streamflow.stages.transfers import staged

pytestmark = pytest.mark.anyio

MakeDevice = Callable[[], Device]
host_devices = pytest.mark.parametrize("make_device", [CpuDevice, partial(SimDevice, 0)], ids=["cpu", "sim"])


async def stream_three_passes(
    device: Device, blocks: ToyBlocks, *, num_threads: int = 2, chunk_bytes: int = 512, window: int = 2
) -> int:
    """Three exact passes; returns the staging bytes."""
    visits = list(blocks.images)
    open_transfer = open_staged(blocks, num_threads=num_threads, chunk_bytes=chunk_bytes)
    with anyio.fail_after(30):
        async with open_walker(device, blocks, EngineOptions(window), open_transfer) as walker:
            assert await walker.run([visits] * 3) == 3 * len(visits)
            statistics = walker.engine.statistics()
    assert statistics.streamed_bytes >= blocks.nbytes
    assert statistics.device_peak_bytes == statistics.window_bytes
    return statistics.staging_bytes


# Chunks


@pytest.mark.parametrize(("chunk_bytes", "num_threads"), [(256, 1), (256, 4), (1000, 2), (4096, 4), (1 << 20, 1)])
async def test_many_small_pieces_and_a_large_one(device: Device, chunk_bytes: int, num_threads: int) -> None:
    small = [1 + 13 * i % 300 for i in range(60)]
    blocks = in_pieces(toy_blocks([small, [20_000], [100, 20_000, 100], small]))
    await stream_three_passes(device, blocks, num_threads=num_threads, chunk_bytes=chunk_bytes)


async def test_pieces_that_cannot_be_cut_are_read_whole(device: Device) -> None:
    blocks = in_pieces(toy_blocks([[700, 3000, 10], [5000], [256] * 5]), lambda block, piece: WholePiece(piece))
    staging_bytes = await stream_three_passes(device, blocks, chunk_bytes=512)
    assert staging_bytes == 2 * 2 * 5120  # two buffers for each of two threads, as large as the largest piece


async def test_pieces_of_both_kinds_in_one_image(device: Device) -> None:
    def wrap(block: int, piece: Piece) -> Piece:
        return WholePiece(piece) if piece.nbytes % 2 else piece

    await stream_three_passes(device, in_pieces(toy_blocks([[701, 3000, 11, 900], [5001, 5000]]), wrap))


async def test_blocks_without_bytes_need_no_staging(device: Device) -> None:
    assert await staging_of(device, toy_blocks([[0], [0]])) == 0


async def test_a_block_without_bytes_among_others(device: Device) -> None:
    await stream_three_passes(device, in_pieces(toy_blocks([[300], [0], [700]])), window=1)


async def staging_of(device: Device, blocks: ToyBlocks) -> int:
    async with open_walker(device, blocks, EngineOptions(1), open_staged(blocks)) as walker:
        assert await walker.run([list(blocks.images)]) == len(blocks.images)
        return walker.engine.statistics().staging_bytes


async def test_each_packing_thread_enters_the_stream_once_and_leaves_it_before_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads are lent: what is current in them would stay so for whoever gets them next."""
    entered: list[int] = []
    left: list[int] = []

    @contextmanager
    def activate(stream: CpuCopyStream) -> Iterator[None]:
        entered.append(threading.get_ident())
        yield
        left.append(threading.get_ident())

    monkeypatch.setattr(CpuCopyStream, "activate", activate)
    await stream_three_passes(CpuDevice(), toy_blocks([[100_000]] * 5), num_threads=3, chunk_bytes=1024)
    assert 1 <= len(entered) == len(set(entered)) <= 3
    assert sorted(left) == sorted(entered)


async def test_staging_is_bounded_by_chunks_and_threads() -> None:
    blocks = toy_blocks([[100_000]] * 3)
    assert await stream_three_passes(SimDevice(0), blocks, num_threads=3, chunk_bytes=1024) == 3 * 2 * 1024


async def test_packing_waits_for_copies_that_are_held_back() -> None:
    """While no copy happens, one thread packs its two buffers and no third chunk."""
    reads: list[int] = []
    two_packed = threading.Semaphore(0)

    class CountedPiece(WholePiece):
        splittable = True

        def read_into(self, address: int, start: int, nbytes: int) -> None:
            reads.append(start)
            self.inner.read_into(address, start, nbytes)
            two_packed.release()

    device = HeldCpuDevice()
    blocks = in_pieces(toy_blocks([[2560]]), lambda block, piece: CountedPiece(piece))
    device.hold()
    with anyio.fail_after(30):
        open_transfer = open_staged(blocks, num_threads=1, chunk_bytes=256)
        async with open_walker(device, blocks, EngineOptions(1), open_transfer) as walker:
            for _ in range(2):
                await anyio.to_thread.run_sync(two_packed.acquire)
            assert reads == [0, 256]
            device.let_go()
            assert await walker.run([[0]]) == 1
    assert reads == list(range(0, 2560, 256))


# Errors


@host_devices
@pytest.mark.parametrize("fails_at", [0, 1, 7])
async def test_an_unreadable_chunk_breaks_the_engine_from_its_cause(make_device: MakeDevice, fails_at: int) -> None:
    def wrap(block: int, piece: Piece) -> Piece:
        return FailingPiece(piece, fails_at=fails_at) if block == 2 else piece

    blocks = in_pieces(toy_blocks([[4000]] * 4), wrap)
    with anyio.fail_after(30):
        async with open_walker(make_device(), blocks, EngineOptions(2), open_staged(blocks)) as walker:
            with walker.engine.broadcast.subscribe() as events:
                for _ in range(2):
                    with pytest.raises(EngineBrokenError, match="close it and open a new one") as caught:
                        await walker.run([[0, 1, 2, 3]])
                    assert isinstance(caught.value.cause, SourceReadError)
                    assert caught.value.__cause__ is caught.value.cause
                seen = [events.receive_nowait() for _ in range(events.statistics().current_buffer_used)]
            assert walker.engine.failure is caught.value.cause
    assert [event.block for event in seen if isinstance(event, FetchFailed)] == [2]
    assert sum(isinstance(event, EngineFailed) for event in seen) == 1


@host_devices
@pytest.mark.parametrize("failure", [OSError("input/output error"), ZeroDivisionError()], ids=repr)
async def test_any_error_of_a_source_is_kept_as_it_is(make_device: MakeDevice, failure: Exception) -> None:
    blocks = in_pieces(toy_blocks([[4000]] * 3), lambda block, piece: FailingPiece(piece, failure=lambda: failure))
    async with open_walker(make_device(), blocks, EngineOptions(2), open_staged(blocks)) as walker:
        with pytest.raises(EngineBrokenError) as caught:
            await walker.run([[0, 1, 2]])
    assert caught.value.cause is failure


@host_devices
async def test_an_unreadable_resident_fails_the_opening_and_leaves_nothing(make_device: MakeDevice) -> None:
    device = make_device()
    blocks = in_pieces(toy_blocks([[4000]] * 3), lambda block, piece: FailingPiece(piece) if block == 1 else piece)
    with pytest.raises(SourceReadError, match="the file must stay as it is"):
        async with open_walker(device, blocks, EngineOptions(1), open_staged(blocks), residents=[0, 1]):
            pytest.fail("the engine opened")
    assert device.memory().in_use == 0


# Cancellation


class Gate:
    """Blocks of which one is held back in its source, and how to see and end that."""

    def __init__(self, gated_block: int) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self._block = gated_block
        self.blocks = in_pieces(toy_blocks([[4000]] * 4), self._wrap)

    def _wrap(self, block: int, piece: Piece) -> Piece:
        return GatedPiece(piece, self.open, self.entered) if block == self._block else piece

    async def wait_entered(self) -> None:
        """Return once a packing thread is inside the source."""
        await anyio.to_thread.run_sync(self.entered.wait)


async def let_others_run() -> None:
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


@host_devices
async def test_closing_while_a_chunk_is_packed_waits_for_it(make_device: MakeDevice) -> None:
    device, gate, closed = make_device(), Gate(gated_block=1), anyio.Event()
    scope = anyio.CancelScope()

    async def open_and_wait() -> None:
        with scope:
            async with open_walker(device, gate.blocks, EngineOptions(2), open_staged(gate.blocks)):
                await anyio.sleep_forever()
        closed.set()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(open_and_wait)
            await gate.wait_entered()
            scope.cancel()
            await let_others_run()
            assert not closed.is_set()
            assert device.memory().in_use > 0
            gate.open.set()
    assert scope.cancelled_caught
    assert device.memory().in_use == 0


@host_devices
async def test_a_cancelled_request_leaves_before_the_packing_is_over(make_device: MakeDevice) -> None:
    """The packing belongs to the engine: it goes on, and the next request is exact."""
    gate = Gate(gated_block=1)
    with anyio.fail_after(30):
        async with open_walker(make_device(), gate.blocks, EngineOptions(2), open_staged(gate.blocks)) as walker:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as task_group:
                    task_group.start_soon(walker.run, [[0, 1, 2, 3]])
                    await gate.wait_entered()
                    scope.cancel()
            assert not gate.open.is_set()
            gate.open.set()
            assert await walker.run([[0, 1, 2, 3]] * 3) == 12


@host_devices
async def test_cancelling_while_a_resident_is_packed_waits_for_it(make_device: MakeDevice) -> None:
    device, gate, left = make_device(), Gate(gated_block=2), anyio.Event()
    scope = anyio.CancelScope()

    async def open_it() -> None:
        with scope:
            async with open_walker(device, gate.blocks, EngineOptions(1), open_staged(gate.blocks), residents=[2]):
                pytest.fail("the engine opened")
        left.set()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(open_it)
            await gate.wait_entered()
            scope.cancel()
            await let_others_run()
            assert not left.is_set()
            gate.open.set()
    assert scope.cancelled_caught
    assert device.memory().in_use == 0


@host_devices
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancels_do_not_leave_a_packing_thread_with_a_freed_buffer(make_device: MakeDevice) -> None:
    """``task.cancel()`` goes through a shield: the second one must not let the buffer go either."""
    device, gate = make_device(), Gate(gated_block=2)

    async def open_it() -> None:
        async with open_walker(device, gate.blocks, EngineOptions(1), open_staged(gate.blocks), residents=[2]):
            pytest.fail("the engine opened")

    with anyio.fail_after(30):
        task = asyncio.get_running_loop().create_task(open_it())
        await gate.wait_entered()
        for _ in range(3):
            task.cancel()
            await let_others_run()
            assert not task.done()
            assert device.memory().in_use > 0
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert device.memory().in_use == 0


# Page locks


async def test_staging_is_page_locked_while_it_is_open() -> None:
    device = SimDevice(0)
    blocks = toy_blocks([[4000]] * 3)
    async with open_walker(device, blocks, EngineOptions(1), open_staged(blocks)):
        assert device.num_page_locks == 1
    assert device.num_page_locks == 0


async def test_refused_page_locks_fail_the_opening_and_leave_nothing() -> None:
    device = SimDevice(0, can_lock_pages=False)
    blocks = toy_blocks([[4000]] * 3)
    with pytest.raises(HostRegistrationError, match="refused"):
        async with open_walker(device, blocks, EngineOptions(1), open_staged(blocks)):
            pytest.fail("the engine opened")
    assert device.memory().peak == 0


async def test_a_page_lock_that_cannot_be_given_back_is_told_after_everything_else_is_freed() -> None:
    device = SimDevice(0)
    device.registrar.num_stuck = 1
    blocks = toy_blocks([[4000]] * 3)
    with pytest.raises(SimLeftoverError) as left:
        async with open_walker(device, blocks, EngineOptions(1), open_staged(blocks), residents=[0]) as walker:
            await walker.run([[0, 1, 2]])
    assert (left.value.num_buffers, left.value.num_page_locks) == (0, 1)
    assert isinstance(left.value.__context__, HostRegistrationError)
    assert device.memory().in_use == 0


async def test_closing_twice_is_closing_once() -> None:
    device = SimDevice(0)
    images = list(toy_blocks([[4000]]).images.values())
    async with open_device(device) as crew:
        stream = device.open_copy_stream("copy")
        transfer = await staged.open_staged(device, stream, crew, images, num_threads=2, chunk_bytes=512)
        transfer.close()
        transfer.close()
        assert device.num_page_locks == 0


async def test_the_copy_does_not_need_the_source_any_more_once_it_is_packed() -> None:
    """What is copied is the staging buffer: a source may change or go after it was read."""
    device = SimDevice(0)
    blocks = toy_blocks([[4000]])
    (piece,) = blocks.images[0].pieces
    assert isinstance(piece, MemoryPiece)
    async with open_device(device) as crew:
        stream, slot = device.open_copy_stream("copy"), device.allocate(blocks.largest)
        images = list(blocks.images.values())
        transfer = await staged.open_staged(device, stream, crew, images, num_threads=2, chunk_bytes=2048)
        expected = piece.data.clone()
        device.hold("copy")
        event = await transfer.fetch(images[0], slot, ()).issued()
        piece.data.zero_()
        device.release("copy")
        await crew.call(event.wait)
        assert slot.equal(expected)
        transfer.close()
        device.free(slot)
