"""What goes wrong around blocks leaves the engine either sound, with a clean window, or broken from a cause."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import anyio
import anyio.lowlevel
import pytest
import torch

from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceMemoryError, EngineBrokenError, NestedBlockError, StopForward
from streamflow.stages.opening import EngineOptions
from streamflow.stages.places import Place
from streamflow.stages.signals import LoopEvent
from streamflow.stages.testing.binder import RecordingBinder
from streamflow.stages.testing.blocks import toy_blocks
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.trials import OpenTransferFor
from streamflow.stages.testing.walker import Walker, open_direct, open_staged, open_walker
from streamflow.stages.walk_sources import ImmediateWalks

pytestmark = pytest.mark.anyio

BLOCKS = toy_blocks([[3000, 100], [500], [2500, 1], [700], [100], [1500]])
IN_ORDER = list(BLOCKS.images)

MakeDevice = Callable[[], Device]
each_device = pytest.mark.parametrize(
    "make_device", [partial(CpuDevice, compute_units=1), *(partial(SimDevice, seed) for seed in range(2))]
)
each_transfer = pytest.mark.parametrize("open_transfer", [open_direct, open_staged])


class ForwardError(Exception):
    """What a block raises here."""


def raise_at(walker: Walker, visit: int, failure: Callable[[], BaseException]) -> None:
    """Let the block number ``visit`` (from 0) of the next run fail, once."""
    left = [visit]

    def inside(place: int, block: int) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise failure()

    walker.inside = inside


# A forward that fails or is stopped


@each_device
@each_transfer
async def test_a_block_that_fails_leaves_a_clean_window(
    make_device: MakeDevice, open_transfer: OpenTransferFor
) -> None:
    with anyio.fail_after(30):
        async with open_walker(make_device(), BLOCKS, EngineOptions(2), open_transfer(BLOCKS), residents=[4]) as walker:
            for visit in range(len(IN_ORDER)):
                for failure in (ForwardError, KeyboardInterrupt):
                    raise_at(walker, visit, failure)
                    with pytest.raises(failure):
                        await walker.run([IN_ORDER])
                    assert await walker.run([IN_ORDER]) == len(IN_ORDER)
            assert walker.engine.failure is None


@each_device
@each_transfer
async def test_a_forward_is_stopped_at_every_boundary_and_the_next_is_exact(
    make_device: MakeDevice, open_transfer: OpenTransferFor
) -> None:
    with anyio.fail_after(30):
        async with open_walker(make_device(), BLOCKS, EngineOptions(2), open_transfer(BLOCKS)) as walker:
            for last in IN_ORDER:
                ran: list[int] = []

                def inside(place: int, block: int, last: int = last, ran: list[int] = ran) -> None:
                    ran.append(block)
                    if block == last:
                        walker.engine.places[place].mailbox.stop()

                walker.inside = inside
                if last == IN_ORDER[-1]:
                    assert await walker.run([IN_ORDER]) == len(IN_ORDER)
                else:
                    with pytest.raises(StopForward):
                        await walker.run([IN_ORDER])
                assert ran == IN_ORDER[: last + 1]
                walker.inside = lambda place, block: None
                assert await walker.run([IN_ORDER]) == len(IN_ORDER)


@each_device
async def test_a_cancelled_run_ends_at_its_block_and_the_next_is_exact(make_device: MakeDevice) -> None:
    with anyio.fail_after(30):
        async with open_walker(make_device(), BLOCKS, EngineOptions(2), open_direct(BLOCKS)) as walker:
            for last in IN_ORDER:
                assert await blocks_run_when_cancelled_in(walker, last) == IN_ORDER[: last + 1]
                walker.inside = lambda place, block: None
                assert await walker.run([IN_ORDER]) == len(IN_ORDER)


async def blocks_run_when_cancelled_in(walker: Walker, last: int) -> list[int]:
    """Cancel a run while its thread is inside block ``last``, and let the thread go on once it was told to stop."""
    entered, gate, scope, ran = LoopEvent(), threading.Event(), anyio.CancelScope(), list[int]()

    def inside(place: int, block: int) -> None:
        ran.append(block)
        if block == last:
            entered.set()
            gate.wait()

    async def request() -> None:
        with scope:
            await walker.run([IN_ORDER])

    walker.inside = inside
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(request)
        await entered.wait()
        scope.cancel()
        while not is_told_to_stop(walker.engine.places[0]):
            await anyio.lowlevel.checkpoint()
        gate.set()
    assert scope.cancelled_caught
    return ran


def is_told_to_stop(place: Place) -> bool:
    try:
        place.mailbox.check()
    except StopForward:
        return True
    return False


@each_device
async def test_a_block_inside_a_block_is_refused_before_it_runs(make_device: MakeDevice) -> None:
    with anyio.fail_after(30):
        async with open_walker(make_device(), BLOCKS, EngineOptions(2), open_direct(BLOCKS)) as walker:

            def nest(place: int, block: int) -> None:
                if block == 1:
                    walker.engine._current[place].enter(5)

            walker.inside = nest
            with pytest.raises(NestedBlockError, match="block 5 was entered inside block 1") as caught:
                await walker.run([IN_ORDER])
            assert (caught.value.block, caught.value.inside) == (5, 1)
            walker.inside = lambda place, block: None
            assert await walker.run([IN_ORDER]) == len(IN_ORDER)


# The order of blocks


@each_device
async def test_skipped_and_repeated_blocks_are_fetched_on_demand_and_the_window_recovers(
    make_device: MakeDevice,
) -> None:
    with anyio.fail_after(30):
        async with open_walker(make_device(), BLOCKS, EngineOptions(2), open_direct(BLOCKS)) as walker:
            await walker.run([IN_ORDER])
            before = walker.engine.statistics()
            assert await walker.run([[0, 5], [5, 4, 3, 2, 1, 0], [0, 0, 3, 3]]) == 12
            between = walker.engine.statistics()
            assert between.num_on_demand_fetches > before.num_on_demand_fetches
            await walker.run([IN_ORDER] * 2)
            settled = walker.engine.statistics()
            await walker.run([IN_ORDER] * 3)
            after = walker.engine.statistics()
    assert after.num_on_demand_fetches == settled.num_on_demand_fetches
    # the statistics are taken while the next pass's first blocks may or may not have been fetched already
    assert abs(after.num_fetches - settled.num_fetches - 3 * len(IN_ORDER)) <= 2


@each_device
async def test_after_a_pass_the_window_holds_what_the_next_one_needs_first(make_device: MakeDevice) -> None:
    with anyio.fail_after(30):
        async with open_walker(make_device(), BLOCKS, EngineOptions(2), open_direct(BLOCKS)) as walker:
            for visits in (IN_ORDER, [0, 5], [3], [1, 2]):
                await walker.run([visits])
                while set(walker.binder.bound) != {0, 1}:
                    await anyio.lowlevel.checkpoint()


@each_transfer
@pytest.mark.parametrize("seed", range(8))
async def test_passes_at_speeds_one_to_ten_never_see_a_block_moved_under_them(
    seed: int, open_transfer: OpenTransferFor
) -> None:
    """Two places, one walk, blocks left out: the walker checks a block's buffer again when the pass leaves it."""
    draw = random.Random(seed)
    passes = [[[block for block in IN_ORDER if draw.random() < 0.8] or [0] for _ in range(3)] for _ in range(2)]

    def dawdle(place: int, block: int) -> None:
        time.sleep(0.002 if place == 0 else 0.0002)

    options = EngineOptions(1 + seed % 4, num_places=2, poison_freed_slots=True)
    with anyio.fail_after(30):
        async with open_walker(
            SimDevice(seed), BLOCKS, options, open_transfer(BLOCKS), walk_source=ImmediateWalks(min_passes=2)
        ) as walker:
            walker.inside = dawdle
            assert await walker.run(*passes) == sum(len(visits) for place in passes for visits in place)


# A binder that fails


class FailingBinder(RecordingBinder):
    """Fails at the call number ``fails_at`` (from 0) of ``action``."""

    def __init__(self, action: str, fails_at: int) -> None:
        super().__init__()
        self._action, self._left = action, fails_at

    def _count(self, action: str) -> None:
        if action == self._action:
            self._left -= 1
            if self._left == -1:
                raise ForwardError(f"{action} fails")

    def bind(self, block: int, place: int, buffer: torch.Tensor) -> None:
        self._count("bind")
        super().bind(block, place, buffer)

    def unbind(self, block: int) -> None:
        super().unbind(block)
        self._count("unbind")


@each_device
@each_transfer
@pytest.mark.parametrize(("action", "fails_at"), [("bind", 0), ("bind", 1), ("bind", 3), ("unbind", 0), ("unbind", 1)])
async def test_a_binder_that_fails_breaks_the_engine_and_is_no_group(
    make_device: MakeDevice, open_transfer: OpenTransferFor, action: str, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamflow.stages.testing.walker.RecordingBinder", lambda: FailingBinder(action, fails_at))
    with anyio.fail_after(30):
        async with open_walker(make_device(), BLOCKS, EngineOptions(2), open_transfer(BLOCKS)) as walker:
            with pytest.raises(EngineBrokenError, match=f"{action} fails") as caught:
                await walker.run([IN_ORDER])
            assert isinstance(caught.value.cause, ForwardError)
            assert walker.engine.failure is caught.value.cause


# A device that is too small


@pytest.mark.parametrize("kind", [CpuDevice, partial(SimDevice, 0)], ids=["cpu", "sim"])
@each_transfer
async def test_an_engine_that_does_not_fit_leaves_nothing(
    kind: Callable[..., Device], open_transfer: OpenTransferFor
) -> None:
    window = 2 * BLOCKS.largest
    for limit in (0, BLOCKS.largest, window - 1, window, window + BLOCKS.images[1].nbytes):
        device = kind(memory_limit_bytes=limit)
        with pytest.raises(DeviceMemoryError, match="use fewer window_blocks or fewer resident blocks"):
            async with open_walker(device, BLOCKS, EngineOptions(2), open_transfer(BLOCKS), residents=[1, 3]):
                pytest.fail("the engine opened")
        assert device.memory().in_use == 0
    device = kind(memory_limit_bytes=window + BLOCKS.images[1].nbytes + BLOCKS.images[3].nbytes)
    async with open_walker(device, BLOCKS, EngineOptions(2), open_transfer(BLOCKS), residents=[1, 3]) as walker:
        assert await walker.run([IN_ORDER] * 3) == 3 * len(IN_ORDER)
    assert device.memory().peak == device.memory().total
