"""The engine on the cpu device: what it counts, how it breaks and stops, and that nothing is left when it closes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import pytest
import torch
from anyio.streams.memory import MemoryObjectReceiveStream

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.devices.cpu import CpuComputeStream, CpuDevice, CpuEvent, copy_bytes
from streamflow.stages.engine import MAX_BUSY_EVENTS, Engine
from streamflow.stages.errors import EngineBrokenError, EngineClosedError, StopForward
from streamflow.stages.events import (
    BlockWanted,
    EngineFailed,
    FetchFailed,
    FetchIssued,
    FetchStarted,
    ObservedEvent,
    PassEnded,
    PassStarted,
    SlotFree,
    SlowDeviceCall,
    WalkEnded,
    WalkStarted,
)
from streamflow.stages.images import BlockImage, memory_image
from streamflow.stages.layout import TensorSpec, plan_layout
from streamflow.stages.opening import EngineOptions, OpenTransfer, open_engine
from streamflow.stages.passes import Pass
from streamflow.stages.places import Place
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import ThreadCrew, open_threads, wait_through
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.transfers.direct import DirectTransfer

pytestmark = pytest.mark.anyio

Result = TypeVar("Result")
ALL = (0, 1, 2, 3)


def images(num_blocks: int = 4) -> dict[int, BlockImage]:
    """Blocks of 256, 512, ... bytes; all bytes of block ``i`` are ``i + 1``."""
    made = {}
    for block in range(num_blocks):
        nbytes = 256 * (block + 1)
        layout = plan_layout([TensorSpec("weight", "uint8", (nbytes,), (1,))])
        made[block] = memory_image(f"block {block}", layout, torch.full((nbytes,), block + 1, dtype=torch.uint8))
    return made


class DictBinder:
    """Remembers which buffer each block is bound to."""

    def __init__(self) -> None:
        self.bound: dict[int, torch.Tensor] = {}

    def bind(self, block: int, place: int, buffer: torch.Tensor) -> None:
        assert block not in self.bound
        self.bound[block] = buffer

    def unbind(self, block: int) -> None:
        self.bound.pop(block, None)


# A transfer under the test's control


class HeldTransfer:
    """Fetches wait until they are let go, one by one or all; scripted blocks fail."""

    name = "held"
    scratch_bytes = 0
    staging_bytes = 0

    def __init__(self) -> None:
        self.started: list[str] = []
        self.num_abandoned = 0
        self.is_closed = False
        self.failures: dict[str, Exception] = {}
        self._held: dict[str, anyio.Event] = {}

    def hold(self, *blocks: int) -> None:
        for block in blocks:
            self._held[f"block {block}"] = anyio.Event()

    def let_go(self, block: int) -> None:
        self._held.pop(f"block {block}").set()

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> HeldFetch:
        self.started.append(image.name)
        return HeldFetch(self, image, slot)

    async def finish(self, image: BlockImage, slot: torch.Tensor) -> Event:
        try:
            if image.name in self._held:
                await self._held[image.name].wait()
        except BaseException:
            self.num_abandoned += 1
            raise
        if image.name in self.failures:
            raise self.failures[image.name]
        assert image.memory is not None
        copy_bytes(slot[: image.nbytes], image.memory)
        event = CpuEvent("held")
        event.happen()
        return event

    def close(self) -> None:
        self.is_closed = True


@attrs.frozen
class HeldFetch:
    transfer: HeldTransfer
    image: BlockImage
    slot: torch.Tensor
    event: Event | None = None

    async def issued(self) -> Event:
        return await self.transfer.finish(self.image, self.slot)


# Running passes


@attrs.define
class Bench:
    """An engine, and what a request needs to run in one of its places."""

    engine: Engine
    binder: DictBinder
    device: CpuDevice

    async def run(
        self,
        *visits: int,
        place: int = 0,
        inside: Callable[[int], object] = lambda block: None,
        component: str = "toy",
    ) -> None:
        """One pass; each block's bytes are checked. Raises what the pass raised, stopped if cancelled."""
        await self.in_place(partial(self.forward, self.engine.places[place], component, visits, inside), place)

    async def in_place(self, work: Callable[[], Result], index: int = 0) -> Result:
        place, done = self.engine.places[index], LoopEvent()
        results: list[Result] = []
        failures: list[BaseException] = []

        def job() -> None:
            try:
                results.append(work())
            except BaseException as failure:
                failures.append(failure)
            finally:
                done.set()

        place.thread.submit(job)
        try:
            await done.wait()
        except BaseException:
            place.mailbox.stop()
            await wait_through(done)
            raise
        if failures:
            raise failures[0]
        return results[0]

    def forward(self, place: Place, component: str, visits: Sequence[int], inside: Callable[[int], object]) -> None:
        running = self.engine.begin_pass(place, component)
        completed = False
        try:
            for block in visits:
                self.visit(running, block, inside)
            completed = True
        finally:
            running.end(completed=completed)

    def visit(self, running: Pass, block: int, inside: Callable[[int], object] = lambda block: None) -> None:
        running.enter(block)
        seen = self.binder.bound[block][: 256 * (block + 1)]
        assert bool((seen == block + 1).all()), f"block {block} ran with the bytes {seen}"
        inside(block)
        running.leave(block)
        running.keep_pace()
        running.count_hooks(0.5)

    async def settled(self, num_fetches: int) -> None:
        """Return once so many fetches began."""
        await wait_until(lambda: self.engine.statistics().num_fetches >= num_fetches)


async def wait_until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not is_so():
            await anyio.lowlevel.checkpoint()


def opens(transfer: Transfer) -> OpenTransfer:
    async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        return transfer

    return open_it


async def open_direct(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
    return DirectTransfer(stream, reads_any_memory=True)


@asynccontextmanager
async def open_bench(
    window_slots: int = 2,
    *,
    num_blocks: int = 4,
    residents: Sequence[int] = (),
    run_ahead_blocks: int | None = None,
    device: CpuDevice | None = None,
    open_transfer: OpenTransfer = open_direct,
) -> AsyncIterator[Bench]:
    """A bench; when it closes, nothing is bound and no byte of the device is in use."""
    device, binder = device or CpuDevice(), DictBinder()
    options = EngineOptions(window_slots, run_ahead_blocks=run_ahead_blocks)
    async with open_threads() as crew:
        await device.open(crew)
        try:
            async with open_engine(
                device=device,
                crew=crew,
                components={"toy": images(num_blocks)},
                residents=residents,
                options=options,
                open_transfer=open_transfer,
                binder=binder,
            ) as engine:
                yield Bench(engine, binder, device)
        finally:
            device.close()
            assert binder.bound == {}
            assert device.memory().in_use == 0


def drain(channel: MemoryObjectReceiveStream[ObservedEvent]) -> list[ObservedEvent]:
    told: list[ObservedEvent] = []
    while channel.statistics().current_buffer_used:
        told.append(channel.receive_nowait())
    return told


def of_type(told: Sequence[ObservedEvent], *types: type[Any]) -> list[Any]:
    return [event for event in told if isinstance(event, types)]


# What is counted


async def test_statistics_count_walks_passes_fetches_and_bytes() -> None:
    async with open_bench(1, residents=[2]) as bench:
        for _ in range(3):
            await bench.run(*ALL)
        await wait_until(lambda: bench.engine.statistics().num_fetches == 3 * 3 + 1)
        counted = bench.engine.statistics()
    assert (counted.num_walks, counted.num_passes) == (3, 3)
    assert counted.num_on_demand_fetches == 0
    assert counted.streamed_bytes == 3 * (256 + 512 + 1024) + 256
    assert (counted.resident_bytes, counted.window_bytes) == (768, 1024)
    assert counted.device_in_use_bytes == counted.device_peak_bytes == 768 + 1024
    assert (counted.num_blocks_run, counted.hooks_cpu_s) == (3 * 4, 6.0)
    assert (counted.scratch_bytes, counted.staging_bytes) == (0, 0)
    assert (counted.num_late_messages, counted.num_dropped_events) == (0, 0)


async def test_a_window_for_all_blocks_is_filled_once() -> None:
    async with open_bench(9) as bench:
        for _ in range(3):
            await bench.run(*ALL)
        counted = bench.engine.statistics()
    assert (counted.num_fetches, counted.streamed_bytes) == (4, 256 * (1 + 2 + 3 + 4))
    assert counted.window_bytes == 4 * 1024


async def test_a_block_out_of_turn_is_counted_as_fetched_on_demand() -> None:
    async with open_bench(1) as bench:
        await bench.run(0, 3)
        assert bench.engine.statistics().num_on_demand_fetches == 1


async def test_waits_for_a_block_are_counted_with_their_time() -> None:
    transfer = HeldTransfer()
    transfer.hold(0)
    async with open_bench(open_transfer=opens(transfer)) as bench, anyio.create_task_group() as tasks:
        with bench.engine.broadcast.subscribe() as channel:
            tasks.start_soon(partial(bench.run, 0))
            await next_of(channel, BlockWanted)
            transfer.let_go(0)
            await next_of(channel, PassEnded)
        counted = bench.engine.statistics()
        assert counted.num_mailbox_waits == 1
        assert counted.mailbox_wait_s > 0


async def all_until(channel: MemoryObjectReceiveStream[ObservedEvent], kind: type[Any]) -> list[Any]:
    """All events up to the next of this kind."""
    told: list[ObservedEvent] = []
    with anyio.fail_after(60):
        async for event in channel:
            told.append(event)
            if isinstance(event, kind):
                return told
    raise AssertionError(f"the channel ended without {kind.__name__}")


async def next_of(channel: MemoryObjectReceiveStream[ObservedEvent], kind: type[Any]) -> Any:
    return (await all_until(channel, kind))[-1]


@pytest.mark.parametrize("residents", [(), ALL])
async def test_without_streamed_blocks_passes_come_and_go(residents: Sequence[int]) -> None:
    num_blocks = len(residents)
    async with open_bench(2, num_blocks=num_blocks, residents=residents) as bench:
        for _ in range(2):
            await bench.run(*range(num_blocks))
        await wait_until(lambda: bench.engine.statistics().num_passes == 2)
        assert bench.engine.statistics().num_fetches == 0


async def test_device_calls_on_the_loop_that_take_too_long_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamflow.stages.engine.SLOW_CALL_S", -1.0)
    async with open_bench(1) as bench:
        with bench.engine.broadcast.subscribe() as channel:
            await bench.run(0, 1)
            slow = of_type(drain(channel), SlowDeviceCall)
        assert {event.what for event in slow} >= {"fetch of block 1", "binding of block 1"}
        assert bench.engine.statistics().num_slow_device_calls >= len(slow)


async def test_many_passes_leave_no_more_behind_than_a_few() -> None:
    async with open_bench(4) as bench:
        for _ in range(5 * MAX_BUSY_EVENTS):
            await bench.run(0)
        await wait_until(lambda: bench.engine.statistics().num_passes == 5 * MAX_BUSY_EVENTS)
        assert all(len(slot.busy_until) <= MAX_BUSY_EVENTS + 1 for slot in bench.engine._window)
        await wait_until(lambda: not bench.engine._mailboxes)


# What observers are told


async def test_observers_are_told_of_a_pass_from_its_start_to_the_end_of_its_walk() -> None:
    async with open_bench(1, num_blocks=2) as bench:
        await bench.settled(1)
        with bench.engine.broadcast.subscribe() as channel:
            await bench.run(0, 1)
            told = await all_until(channel, WalkEnded)
            await bench.settled(3)
            told += drain(channel)
    of_the_walk = of_type(told, PassStarted, WalkStarted, PassEnded, WalkEnded)
    assert [type(event).__name__ for event in of_the_walk] == ["PassStarted", "WalkStarted", "PassEnded", "WalkEnded"]
    assert {event.pass_id for event in of_type(told, PassStarted, PassEnded)} == {1}
    assert of_type(told, WalkStarted, WalkEnded) == [WalkStarted(1, "toy", (1,)), WalkEnded(1)]
    assert [(event.block, event.generation) for event in of_type(told, FetchStarted)] == [(1, 2), (0, 3)]
    assert [event.block for event in of_type(told, SlotFree)] == [0, 1]


async def test_an_observer_that_reads_nothing_loses_events_and_is_in_nobodys_way() -> None:
    async with open_bench() as bench:
        with bench.engine.broadcast.subscribe(capacity=1) as channel:
            for _ in range(3):
                await bench.run(*ALL)
            assert channel.statistics().current_buffer_used == 1
        assert bench.engine.statistics().num_dropped_events > 10
        await bench.run(*ALL)
    assert bench.engine.statistics().num_dropped_events > 10


# How it breaks


async def test_a_fetch_that_fails_ends_the_pass_that_waits_and_every_later_one() -> None:
    transfer, cause = HeldTransfer(), OSError("the disk is gone")
    transfer.failures["block 2"] = cause
    async with open_bench(open_transfer=opens(transfer)) as bench:
        with bench.engine.broadcast.subscribe() as channel:
            for _ in range(2):
                with pytest.raises(EngineBrokenError, match="OSError: the disk is gone") as caught:
                    await bench.run(*ALL)
                assert caught.value.cause is caught.value.__cause__ is cause
            told = drain(channel)
        assert bench.engine.failure is cause
        assert of_type(told, FetchFailed) == [FetchFailed(2, cause)]
        assert of_type(told, EngineFailed) == [EngineFailed(cause)]
    assert transfer.is_closed


async def test_a_pass_that_already_waits_when_the_fetch_fails_is_ended() -> None:
    transfer, cause = HeldTransfer(), OSError("the disk is gone")
    transfer.failures["block 0"] = cause
    transfer.hold(0)
    async with open_bench(open_transfer=opens(transfer)) as bench:
        with bench.engine.broadcast.subscribe() as channel, pytest.raises(EngineBrokenError) as caught:
            await run_and_let_go(bench, channel, transfer)
        assert caught.value.cause is cause


async def run_and_let_go(
    bench: Bench, channel: MemoryObjectReceiveStream[ObservedEvent], transfer: HeldTransfer
) -> None:
    """A pass that waits for block 0, which is let go once it does."""

    async def let_go() -> None:
        await next_of(channel, BlockWanted)
        transfer.let_go(0)

    failures: list[BaseException] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(let_go)
        try:
            await bench.run(0)
        except EngineBrokenError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


async def test_the_first_failure_stays() -> None:
    transfer = HeldTransfer()
    transfer.hold(1)
    transfer.failures = {"block 0": OSError("the first"), "block 1": OSError("the second")}
    async with open_bench(open_transfer=opens(transfer)) as bench:
        await wait_until(lambda: bench.engine.failure is not None)
        await anyio.wait_all_tasks_blocked()  # the first one has been told
        with bench.engine.broadcast.subscribe() as channel:
            transfer.let_go(1)
            await next_of(channel, FetchFailed)
            assert of_type(drain(channel), EngineFailed) == []
        assert str(bench.engine.failure) == "the first"


class AwaitedEvent(CpuEvent):
    """Happens when it is waited for."""

    def wait(self) -> None:
        self.happen()
        super().wait()


class AwaitedTransfer(HeldTransfer):
    """Its fetches end on a stream of its own, after they are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[AwaitedEvent] = []
        self.num_under_way: int | None = None

    async def finish(self, image: BlockImage, slot: torch.Tensor) -> Event:
        await super().finish(image, slot)
        self.events.append(AwaitedEvent("late"))
        return self.events[-1]

    def close(self) -> None:
        self.num_under_way = sum(not event.is_done() for event in self.events)


async def test_buffers_outlive_what_was_issued_into_them_when_the_engine_had_failed_already() -> None:
    transfer = AwaitedTransfer()
    transfer.hold(0)
    transfer.failures["block 1"] = OSError("the disk is gone")
    async with open_bench(open_transfer=opens(transfer)) as bench:
        await wait_until(lambda: bench.engine.failure is not None)
        transfer.let_go(0)
        await wait_until(lambda: bool(transfer.events))
        await anyio.wait_all_tasks_blocked()
    assert transfer.num_under_way == 0


class FailingDevice(CpuDevice):
    """Its first copy fails, and so does every later one."""

    def open_copy_stream(self, name: str) -> Stream:
        stream = super().open_copy_stream(name)
        stream.submit(partial(raise_error, OSError("the link is down")))
        return stream


async def test_a_copy_that_fails_on_the_device_breaks_the_engine_for_every_pass() -> None:
    async with open_bench(device=FailingDevice()) as bench:
        with pytest.raises(EngineBrokenError, match="the link is down"):
            await bench.run(0)
        assert isinstance(bench.engine.failure, OSError)
        with pytest.raises(EngineBrokenError, match="the link is down"):
            await bench.run(1)


async def test_whoever_meets_a_failed_copy_finds_the_engine_broken_before_the_loop_hears_of_it() -> None:
    async with open_bench(device=FailingDevice()) as bench:
        running = await bench.in_place(partial(bench.engine.begin_pass, bench.engine.places[0], "toy"))
        await wait_until(lambda: bench.engine.statistics().num_walks == 1)
        with pytest.raises(EngineBrokenError):
            running.enter(0)  # here, so that the loop has no turn
        assert isinstance(bench.engine.failure, OSError)


def raise_error(error: BaseException) -> None:
    raise error


async def test_a_block_that_nobody_knows_breaks_the_engine_instead_of_hanging() -> None:
    async with open_bench() as bench:
        with pytest.raises(EngineBrokenError) as caught:
            await bench.run(99)
        assert isinstance(caught.value.cause, KeyError)


async def test_a_transfer_that_cannot_be_opened_fails_the_opening_and_leaves_nothing() -> None:
    async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        raise OSError("no staging memory")

    with pytest.raises(OSError, match="no staging memory"):
        async with open_bench(open_transfer=open_it):
            pass


# How passes end


async def test_a_stop_ends_a_pass_that_waits_and_the_next_is_exact() -> None:
    transfer = HeldTransfer()
    transfer.hold(1)
    async with open_bench(open_transfer=opens(transfer)) as bench:
        place = bench.engine.places[0]
        with bench.engine.broadcast.subscribe() as channel:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(expect_stop, bench)
                while (await next_of(channel, BlockWanted)).block != 1:
                    pass
                place.mailbox.stop()
        transfer.let_go(1)
        await bench.in_place(partial(bench.engine.end_request, place))
        await bench.run(*ALL)
        assert bench.engine.failure is None


async def expect_stop(bench: Bench) -> None:
    with pytest.raises(StopForward):
        await bench.run(*ALL)


async def test_a_stop_inside_a_block_ends_the_pass_before_the_next() -> None:
    ran: list[int] = []

    def stop_in_1(block: int) -> None:
        ran.append(block)
        if block == 1:
            bench.engine.places[0].mailbox.stop()

    async with open_bench(4) as bench:
        await bench.settled(4)  # block 2 could run at once
        with pytest.raises(StopForward):
            await bench.run(*ALL, inside=stop_in_1)
        assert ran == [0, 1]
        with pytest.raises(StopForward):
            await bench.run(0)
        await bench.in_place(partial(bench.engine.end_request, bench.engine.places[0]))
        await bench.run(*ALL)


@pytest.mark.parametrize("fails_in", ALL)
async def test_a_pass_that_fails_inside_a_block_gives_back_its_slots_and_its_compute_unit(fails_in: int) -> None:
    def fail(block: int) -> None:
        if block == fails_in:
            raise ZeroDivisionError(block)

    async with open_bench(1, device=CpuDevice(compute_units=1)) as bench:
        with bench.engine.broadcast.subscribe() as channel:
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    await bench.run(*ALL, inside=fail)
                await bench.run(*ALL)
                assert [(await next_of(channel, PassEnded)).completed for _ in range(2)] == [False, True]
        assert bench.engine.failure is None


async def test_a_pass_that_was_left_open_is_ended_by_the_next_in_its_place() -> None:
    async with open_bench(1, device=CpuDevice(compute_units=1)) as bench:
        with bench.engine.broadcast.subscribe() as channel:

            def leave_open() -> int:
                running = bench.engine.begin_pass(bench.engine.places[0], "toy")
                running.enter(0)
                return running.pass_id

            left_open = await bench.in_place(leave_open)
            await bench.run(*ALL)
            ended = [await next_of(channel, PassEnded) for _ in range(2)]
        assert [(event.pass_id, event.completed) for event in ended] == [(left_open, False), (left_open + 1, True)]


async def test_the_end_of_a_request_ends_its_pass_too() -> None:
    async with open_bench() as bench:
        place = bench.engine.places[0]
        with bench.engine.broadcast.subscribe() as channel:
            await bench.in_place(partial(bench.engine.begin_pass, place, "toy"))
            await bench.in_place(partial(bench.engine.end_request, place))
            assert not (await next_of(channel, PassEnded)).completed


async def test_ending_twice_is_ending_once() -> None:
    async with open_bench() as bench:
        with bench.engine.broadcast.subscribe() as channel:

            def end_twice() -> None:
                running = bench.engine.begin_pass(bench.engine.places[0], "toy")
                running.end(completed=True)
                running.end(completed=False)

            await bench.in_place(end_twice)
            await bench.run(0)
            ended = [await next_of(channel, PassEnded) for _ in range(2)]
        assert [(event.pass_id, event.completed) for event in ended] == [(1, True), (2, True)]


# How far passes run ahead


class LateEvent(CpuEvent):
    """An event that happens when the test says so, and that knows whether a thread waits for it."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.is_awaited = threading.Event()

    def wait(self) -> None:
        self.is_awaited.set()
        super().wait()


class LateStream(CpuComputeStream):
    """A compute stream whose work is done when the test says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None)
        self.events: list[LateEvent] = []
        self._is_late = True

    def record(self, reuse: Event | None = None) -> LateEvent:
        event = LateEvent(self.name)
        self.events.append(event)
        if not self._is_late:
            event.happen()
        return event

    @property
    def num_behind(self) -> int:
        return sum(not event.is_done() for event in self.events)

    def catch_up(self) -> None:
        self._is_late = False
        for event in self.events:
            event.happen()

    async def be_as_late_as_allowed(self) -> None:
        """Do work only when a thread waits for it, and no more than that."""
        while True:
            awaited = [i for i, event in enumerate(self.events) if event.is_awaited.is_set()]
            for event in self.events[: max(awaited, default=-1) + 1]:
                event.happen()
            await anyio.lowlevel.checkpoint()


class LateDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.compute = LateStream("late")

    def open_compute_stream(self, name: str) -> Stream:
        return self.compute


@pytest.mark.parametrize("run_ahead_blocks", [0, 1, 2, 5])
async def test_a_thread_runs_ahead_of_the_device_by_no_more_blocks_than_allowed(run_ahead_blocks: int) -> None:
    behind: list[int] = []
    device = LateDevice()
    async with open_bench(4, device=device, run_ahead_blocks=run_ahead_blocks) as bench:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(device.compute.be_as_late_as_allowed)
                await bench.run(*ALL * 4, inside=lambda block: behind.append(device.compute.num_behind))
                tasks.cancel_scope.cancel()
        finally:
            device.compute.catch_up()
        assert bench.engine.statistics().run_ahead_wait_s > 0
    assert len(behind) == 16
    assert max(behind) == run_ahead_blocks


# Closing


@pytest.mark.parametrize("how", ["leaving", "an error", "a cancellation", "both"])
async def test_closing_while_fetches_are_under_way_ends_them_and_frees_everything(how: str) -> None:
    transfer, device = HeldTransfer(), CpuDevice()
    transfer.hold(0, 1)
    failure: BaseException | None = None
    with anyio.fail_after(60), anyio.CancelScope() as scope:
        try:
            async with open_bench(open_transfer=opens(transfer), device=device):
                await wait_until(lambda: len(transfer.started) == 2)
                await anyio.wait_all_tasks_blocked()
                if how in ("a cancellation", "both"):
                    scope.cancel()
                if how in ("an error", "both"):
                    raise ZeroDivisionError
                await anyio.lowlevel.checkpoint()
        except ZeroDivisionError as error:
            failure = error
    assert (failure is not None) == (how in ("an error", "both"))
    assert scope.cancelled_caught == (how == "a cancellation")
    assert transfer.num_abandoned == 2
    assert transfer.is_closed
    assert device.memory().in_use == 0


async def test_a_cancelled_request_leaves_a_waiting_pass_and_the_engine_closes() -> None:
    transfer = HeldTransfer()
    transfer.hold(0)
    with anyio.fail_after(60), anyio.CancelScope() as scope:
        async with open_bench(open_transfer=opens(transfer)) as bench, anyio.create_task_group() as tasks:
            with bench.engine.broadcast.subscribe() as channel:
                tasks.start_soon(bench.run, 0)
                await next_of(channel, BlockWanted)
                scope.cancel()
                await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert transfer.is_closed


async def test_a_cancellation_around_the_engine_does_not_stop_it_under_a_pass() -> None:
    with anyio.CancelScope() as scope:
        async with open_bench(1) as bench:
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await bench.run(*ALL)
    assert bench.engine.statistics().num_blocks_run == 4


async def test_what_passes_say_after_closing_is_counted_as_late() -> None:
    async with open_bench() as bench:
        running = await bench.in_place(partial(bench.engine.begin_pass, bench.engine.places[0], "toy"))
        await wait_until(lambda: bench.engine.statistics().num_passes == 1)
    running.end(completed=False)
    assert bench.engine.statistics().num_late_messages == 1


async def test_fetches_are_told_in_order_and_each_of_a_slot_only_after_the_last_was_issued() -> None:
    async with open_bench(2) as bench:
        with bench.engine.broadcast.subscribe() as channel:
            for _ in range(3):
                await bench.run(*ALL)
            told = of_type(drain(channel), FetchStarted, FetchIssued, SlotFree)
    last: dict[int, str] = {}
    for event in told:
        kind = type(event).__name__
        assert (last.get(event.slot), kind) in {
            *((None, kind), ("FetchStarted", "FetchIssued")),
            *(("FetchIssued", "SlotFree"), ("SlotFree", "FetchStarted")),
        }
        last[event.slot] = kind


# Several components


async def test_two_components_stream_through_one_window_and_take_turns() -> None:
    binder, device = DictBinder(), CpuDevice()
    made = images(5)
    components = {"first": {b: made[b] for b in (0, 1, 2)}, "second": {b: made[b] for b in (3, 4)}}
    async with open_threads() as crew:
        await device.open(crew)
        async with open_engine(
            device=device,
            crew=crew,
            components=components,
            residents=[1],
            options=EngineOptions(2, num_places=2),
            open_transfer=open_direct,
            binder=binder,
        ) as engine:
            bench = Bench(engine, binder, device)
            with engine.broadcast.subscribe() as channel:
                for _ in range(3):
                    await bench.run(0, 1, 2, component="first")
                    await bench.run(3, 4, place=1, component="second")
                told: list[ObservedEvent] = []
                while len(of_type(told, WalkEnded)) < 6:
                    told += await all_until(channel, WalkEnded)
            counted = engine.statistics()
        device.close()
    assert [walk.component for walk in of_type(told, WalkStarted)] == ["first", "second"] * 3
    assert counted.window_bytes == 2 * 5 * 256
    assert counted.device_peak_bytes == 2 * 5 * 256 + 512
    assert binder.bound == {}
    assert device.memory().in_use == 0


async def test_a_block_of_another_component_breaks_the_engine_instead_of_hanging() -> None:
    async with open_bench() as bench:
        with pytest.raises(EngineBrokenError) as caught:
            await bench.run(0, component="elsewhere")
        assert isinstance(caught.value.cause, KeyError)


# Closing


async def test_a_pass_that_comes_after_closing_is_told_and_waits_for_nothing() -> None:
    async with open_bench() as bench:
        await bench.run(*ALL)
        engine = bench.engine
        begun = await bench.in_place(partial(engine.begin_pass, engine.places[0], "toy"))
    with pytest.raises(EngineClosedError):
        engine.begin_pass(engine.places[0], "toy")
    with pytest.raises(EngineClosedError):
        begun.enter(3)


async def test_a_pass_that_waits_while_the_engine_closes_is_woken() -> None:
    transfer = HeldTransfer()
    transfer.hold(0)
    async with anyio.create_task_group() as tasks, open_bench(open_transfer=opens(transfer)) as bench:
        with bench.engine.broadcast.subscribe() as channel:
            tasks.start_soon(expect_closed, bench)
            await next_of(channel, BlockWanted)


async def expect_closed(bench: Bench) -> None:
    with anyio.CancelScope(shield=True), pytest.raises(EngineClosedError):
        await bench.run(0)


class StubbornBinder(DictBinder):
    """Fails to unbind."""

    def unbind(self, block: int) -> None:
        super().unbind(block)
        raise OSError("the module is gone")


async def fail_in_an_engine_that_cannot_close(device: CpuDevice) -> None:
    async with open_threads() as crew:
        await device.open(crew)
        async with open_engine(
            device=device,
            crew=crew,
            components={"toy": images(2)},
            residents=[0],
            options=EngineOptions(1),
            open_transfer=open_direct,
            binder=StubbornBinder(),
        ):
            raise ZeroDivisionError


async def test_an_error_of_the_body_leaves_as_it_is_when_giving_back_fails_too() -> None:
    device = CpuDevice()
    with pytest.raises(ZeroDivisionError) as caught:
        await fail_in_an_engine_that_cannot_close(device)
    assert caught.value.__notes__ == ["closing the engine failed, too: OSError: the module is gone"]
    assert device.memory().in_use == 0
