"""Components come to the device for those who ask, stay under them, and go; also when memory is short or work fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from streamflow.stages import movables
from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import (
    DeviceMemoryError,
    DeviceStreamError,
    EngineBrokenError,
    NestedComponentError,
    SourceReadError,
    StopForward,
)
from streamflow.stages.events import CacheDecided, ComponentArrived, ComponentFailed, ComponentLeft, ObservedEvent
from streamflow.stages.ledger import Presence
from streamflow.stages.places import Place
from streamflow.stages.retention import Reason
from streamflow.stages.testing.blocks import in_pieces, toy_blocks
from streamflow.stages.testing.pieces import FailingPiece
from streamflow.stages.testing.queues import SimLeftoverError
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.walker import WrongBytesError
from tests.stages.residents import Residents, open_residents

pytestmark = pytest.mark.anyio

BLOCKS = toy_blocks([[3000, 100], [2000], [1000, 700]])
SIZES = [image.nbytes for image in BLOCKS.images.values()]
MakeDevice = Callable[[], Device]
each_device = pytest.mark.parametrize("make_device", [CpuDevice, *(partial(SimDevice, seed) for seed in range(3))])


@each_device
@pytest.mark.parametrize("budget", [None, max(SIZES), sum(SIZES)])
async def test_every_visit_sees_the_components_own_bytes(make_device: MakeDevice, budget: int | None) -> None:
    device = make_device()
    with anyio.fail_after(30):
        async with open_residents(device, BLOCKS, budget_bytes=budget, num_places=3) as residents:
            for seed in range(10):
                order = random.Random(seed)
                await residents.run(*([order.randrange(3) for _ in range(4)] for _ in range(3)))
            assert device.memory().peak <= (budget or sum(SIZES))
            assert residents.residency.peak_bytes <= (budget or sum(SIZES))
    assert residents.failures == []


@each_device
async def test_a_component_goes_when_its_last_holder_goes_on(make_device: MakeDevice) -> None:
    with anyio.fail_after(30):
        async with open_residents(make_device(), BLOCKS) as residents:
            await residents.run([0, 0, 1])
            await until_absent(residents, "1")
            history = [(entry.action, entry.block) for entry in residents.binder.history]
    assert history[-1] == ("unbind", 1)
    assert ("unbind", 0) in history


async def until_set(event: threading.Event) -> None:
    while not event.is_set():
        await anyio.lowlevel.checkpoint()


async def until_waiting(residents: Residents, number: int) -> None:
    while residents.residency.num_waiting != number:
        await anyio.lowlevel.checkpoint()


async def until_absent(residents: Residents, *components: str) -> None:
    while any(residents.residency.presence(name) is not Presence.ABSENT for name in components):
        await anyio.lowlevel.checkpoint()
    assert residents.residency.staged_bytes == 0


@each_device
async def test_a_kept_component_is_used_again_where_it_is(make_device: MakeDevice) -> None:
    with anyio.fail_after(30):
        async with open_residents(make_device(), BLOCKS) as residents:
            await residents.run([0, 0, 0], keep=True)
            await residents.run([0], keep=True)
            assert [entry.action for entry in residents.binder.history] == ["bind"]
            assert residents.residency.presence("0") is Presence.PRESENT
            await residents.run([1])
            await until_absent(residents, "0", "1")


@each_device
async def test_two_requests_never_have_more_than_the_budget(make_device: MakeDevice) -> None:
    """The second waits until the first is done, and no component moves under either."""
    first_is_inside, may_leave = threading.Event(), threading.Event()
    device = make_device()

    def inside(place: Place, block: int) -> None:
        if place.index == 0:
            first_is_inside.set()
            assert may_leave.wait(20)

    with anyio.fail_after(30):
        async with open_residents(device, BLOCKS, budget_bytes=SIZES[0] + SIZES[1] - 1, num_places=2) as residents:
            residents.inside = inside

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(residents.run, [0, 2])
                await until_set(first_is_inside)
                tasks.start_soon(partial(residents.run, [1, 2, 0], first_place=1))
                await until_waiting(residents, 1)
                assert residents.residency.presence("1") is Presence.ABSENT
                may_leave.set()
    assert device.memory().peak <= SIZES[0] + SIZES[1] - 1


@each_device
async def test_a_stopped_request_waits_no_longer_and_holds_up_nobody(make_device: MakeDevice) -> None:
    is_inside = threading.Event()
    may_leave = threading.Event()

    def inside(place: Place, block: int) -> None:
        if place.index == 0:
            is_inside.set()
            assert may_leave.wait(20)

    with anyio.fail_after(30):
        async with open_residents(make_device(), BLOCKS, budget_bytes=max(SIZES), num_places=2) as residents:
            residents.inside = inside

            async def stop_the_second() -> None:
                await until_waiting(residents, 1)
                residents.places[1].mailbox.stop()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(residents.run, [0])
                await until_set(is_inside)
                tasks.start_soon(stop_the_second)
                with pytest.raises(StopForward):
                    await residents.run([1], first_place=1)
                await until_waiting(residents, 0)
                may_leave.set()
            residents.inside = lambda place, block: None
            await residents.run([1], [2])


@each_device
async def test_a_component_called_inside_another_is_served_or_refused(make_device: MakeDevice) -> None:
    for budget, fits in ((SIZES[0] + SIZES[1], True), (SIZES[0] + SIZES[1] - 1, False)):
        with anyio.fail_after(30):
            async with open_residents(make_device(), BLOCKS, budget_bytes=budget) as residents:

                def inside(place: Place, block: int, residents: Residents = residents) -> None:
                    residents.residency.ask(place, "1", keep=False)
                    residents.residency.release(place, "1")

                residents.inside = inside
                if fits:
                    await residents.run([0])
                else:
                    with pytest.raises(NestedComponentError, match=r"raise device_budget_bytes") as caught:
                        await residents.run([0])
                    assert (caught.value.component, caught.value.budget) == ("1", budget)
                residents.inside = lambda place, block: None
                await residents.run([0, 1, 2])


class CachingDevice(CpuDevice):
    """A device whose allocator keeps ``hoard`` bytes until they are released."""

    def __init__(self, limit: int, hoard: int) -> None:
        super().__init__(memory_limit_bytes=limit)
        self.hoard = hoard
        self.num_releases = 0
        self._meter.take(hoard)

    def release_cache(self) -> None:
        self.num_releases += 1
        self._meter.give_back(self.hoard)
        self.hoard = 0


async def test_out_of_memory_releases_the_cache_and_tries_once_more() -> None:
    device = CachingDevice(limit=max(SIZES), hoard=100)
    with anyio.fail_after(30):
        async with open_residents(device, BLOCKS, budget_bytes=max(SIZES)) as residents:
            with residents.broadcast.subscribe(kinds=(CacheDecided,)) as events:
                await residents.run([0])
                await until_absent(residents, "0")
                forced = await events.receive()
            assert isinstance(forced, CacheDecided)
            assert (forced.retention.reason, forced.retention.deferred) == (Reason.OUT_OF_MEMORY, False)
            assert device.num_releases >= 1


async def test_out_of_memory_for_good_is_the_original_error_and_leaves_nothing() -> None:
    device = CachingDevice(limit=SIZES[1], hoard=7)
    with anyio.fail_after(30):
        async with open_residents(device, BLOCKS) as residents:
            with pytest.raises(DeviceMemoryError) as caught:
                await residents.run([0])
            assert caught.value.wanted == SIZES[0]
            assert caught.value.in_use == 7  # as it was before the cache was released
            await until_absent(residents, "0")
            assert device.memory().in_use == 0
            await residents.run([1])
    assert residents.failures == []


async def test_a_component_of_several_blocks_that_does_not_fit_is_given_back_whole() -> None:
    device = CpuDevice(memory_limit_bytes=SIZES[0] + SIZES[1])
    device._meter.take(1)
    movable = movables.Movable("all", BLOCKS.images, binder=None, device=device)  # type: ignore[arg-type]
    with pytest.raises(DeviceMemoryError):
        movable.allocate()
    assert device.memory().in_use == 1


@pytest.mark.parametrize("seed", range(3))
async def test_a_source_that_fails_while_it_is_read_is_told_to_who_asked(seed: int) -> None:
    """By a transfer that reads when the copy is queued; nothing half-loaded stays, and others go on."""
    blocks = in_pieces(BLOCKS, lambda block, piece: FailingPiece(piece, fails_at=0 if block == 1 else 1 << 30))
    device = SimDevice(seed)
    with anyio.fail_after(30):
        async with open_residents(device, blocks) as residents:
            original = residents.residency._transfer.fetch
            residents.residency._transfer.fetch = _reading(original)  # type: ignore[method-assign]
            with residents.broadcast.subscribe(kinds=(ComponentFailed,)) as events:
                with pytest.raises(SourceReadError):
                    await residents.run([1])
                failed = await events.receive()
            assert isinstance(failed, ComponentFailed)
            assert (failed.component, failed.staged_bytes) == ("1", 0)
            assert device.memory().in_use == 0
            await residents.run([0, 2])
    assert residents.failures == []


def _reading(fetch):  # type: ignore[no-untyped-def]
    """A fetch that has read the image when it returns, as a packing transfer has."""

    def read_and_fetch(image, slot, after):  # type: ignore[no-untyped-def]
        for piece in image.pieces:
            piece.read_into(slot.data_ptr() + piece.offset_bytes, 0, 0)
        return fetch(image, slot, after)

    return read_and_fetch


async def test_a_copy_that_fails_on_the_device_breaks_the_engine() -> None:
    blocks = in_pieces(BLOCKS, lambda block, piece: FailingPiece(piece))
    with anyio.fail_after(30):
        async with open_residents(CpuDevice(), blocks) as residents:
            with pytest.raises(EngineBrokenError):
                await residents.run([1])
    assert [type(failure) for failure in residents.failures] == [SourceReadError]


async def test_boundaries_are_told_with_the_bytes_that_are_staged() -> None:
    with anyio.fail_after(30):
        async with open_residents(CpuDevice(), BLOCKS) as residents:
            kinds = (ComponentArrived, ComponentLeft)
            seen: list[ObservedEvent] = []
            with residents.broadcast.subscribe(kinds=kinds) as events:
                await residents.run([0])
                await until_absent(residents, "0")
                seen = [await events.receive(), await events.receive()]
    assert seen == [ComponentArrived("0", SIZES[0], SIZES[0]), ComponentLeft("0", SIZES[0], 0)]


@pytest.mark.parametrize("budget", [None, max(SIZES)])
async def test_closing_takes_away_what_is_kept(budget: int | None) -> None:
    device = CpuDevice()
    with anyio.fail_after(30):
        async with open_residents(device, BLOCKS, budget_bytes=budget) as residents:
            await residents.run([2], keep=True)
            assert device.memory().in_use == SIZES[2]
    assert device.memory().in_use == 0


async def test_a_cancelled_owner_gives_everything_back() -> None:
    device = CpuDevice()
    with anyio.move_on_after(30) as scope:
        async with open_residents(device, BLOCKS) as residents:
            await residents.run([0], keep=True)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert device.memory().in_use == 0


# Planted faults


def free_without_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(movables.Movable, "note_use", lambda self, event: None)


def use_without_waiting(patch: pytest.MonkeyPatch) -> None:
    async def fetch(self, transfer):  # type: ignore[no-untyped-def]
        await original(self, transfer)
        self.ready = ()

    original = movables.Movable.fetch
    patch.setattr(movables.Movable, "fetch", fetch)


@pytest.mark.parametrize("plant", [free_without_waiting, use_without_waiting])
async def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with anyio.fail_after(60):
        for seed in range(60):
            try:
                async with open_residents(SimDevice(seed), BLOCKS, num_places=2) as residents:
                    await residents.run([0, 1, 2], [2, 0])
            except (WrongBytesError, DeviceStreamError, SimLeftoverError):
                return
    pytest.fail("nobody saw it")
