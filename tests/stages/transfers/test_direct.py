"""The direct transfer: whole images, images in pieces, and sources that are read in the stream's turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import pytest

from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import EngineBrokenError, SourceReadError, StreamflowError
from streamflow.stages.images import Piece
from streamflow.stages.opening import EngineOptions
from streamflow.stages.testing.blocks import ToyBlocks, in_pieces, toy_blocks
from streamflow.stages.testing.held import HeldCpuDevice
from streamflow.stages.testing.pieces import FailingPiece, WrappedPiece
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.walker import open_direct, open_walker

pytestmark = pytest.mark.anyio

MakeDevice = Callable[[], Device]
host_devices = pytest.mark.parametrize("make_device", [CpuDevice, partial(SimDevice, 0)], ids=["cpu", "sim"])


async def stream_three_passes(device: Device, blocks: ToyBlocks) -> None:
    visits = list(blocks.images)
    with anyio.fail_after(30):
        async with open_walker(device, blocks, EngineOptions(2), open_direct(blocks)) as walker:
            assert await walker.run([visits] * 3) == 3 * len(visits)
            assert walker.engine.statistics().streamed_bytes >= blocks.nbytes


async def test_an_image_that_lies_whole_in_memory_is_copied_at_once(device: Device) -> None:
    await stream_three_passes(device, toy_blocks([[100, 3000], [1], [256] * 20, [7000]]))


async def test_an_image_in_pieces_is_copied_piece_by_piece(device: Device) -> None:
    await stream_three_passes(device, in_pieces(toy_blocks([[100, 3000], [1], [256] * 20, [7000]])))


@host_devices
async def test_other_sources_are_read_straight_into_the_slot(make_device: MakeDevice) -> None:
    blocks = in_pieces(toy_blocks([[100, 3000], [1], [256] * 20]), lambda block, piece: WrappedPiece(piece))
    await stream_three_passes(make_device(), blocks)


async def test_nothing_runs_from_a_block_whose_copy_is_held_back() -> None:
    device = HeldCpuDevice()
    blocks = toy_blocks([[3000], [100]])
    device.hold()
    with anyio.fail_after(30):
        async with open_walker(device, blocks, EngineOptions(2), open_direct(blocks)) as walker:
            ran: list[int] = []
            walker.inside = lambda place, block: ran.append(block)
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(walker.run, [[0, 1]])
                while not walker.engine.statistics().num_passes:
                    await anyio.lowlevel.checkpoint()
                assert ran == []
                device.let_go()
            assert ran == [0, 1]


async def test_an_unreadable_source_breaks_the_engine_before_a_block_computes_from_it() -> None:
    """Also when the copy had failed before anybody asked: a failed event must not be taken for one that happened."""

    def wrap(block: int, piece: Piece) -> Piece:
        return FailingPiece(piece) if block == 1 else piece

    blocks = in_pieces(toy_blocks([[3000]] * 3), wrap)
    with anyio.fail_after(30):
        async with open_walker(CpuDevice(), blocks, EngineOptions(3), open_direct(blocks)) as walker:
            for _ in range(3):
                with pytest.raises(EngineBrokenError) as caught:
                    await walker.run([[0, 1, 2]])
                assert isinstance(caught.value.cause, SourceReadError)
            while walker.engine.failure is None:
                await anyio.lowlevel.checkpoint()
            assert isinstance(walker.engine.failure, SourceReadError)


@pytest.mark.parametrize("seed", range(10))
async def test_an_unreadable_source_never_yields_a_result_on_a_device_that_runs_behind(seed: int) -> None:
    def wrap(block: int, piece: Piece) -> Piece:
        return FailingPiece(piece) if block == 1 else piece

    blocks = in_pieces(toy_blocks([[3000]] * 3), wrap)
    with anyio.fail_after(30):
        async with open_walker(SimDevice(seed), blocks, EngineOptions(2), open_direct(blocks)) as walker:
            for _ in range(2):
                with pytest.raises(StreamflowError, match="the test wants it so"):
                    await walker.run([[0, 1, 2]])
