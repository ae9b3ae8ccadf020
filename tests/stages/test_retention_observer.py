"""The retention policy at component boundaries: when the allocator's cache is given back, kept, or given back later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import attrs
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream

from streamflow.stages.devices.base import MemoryReading
from streamflow.stages.devices.cpu import CpuDevice, CpuEvent
from streamflow.stages.events import (
    CacheDecided,
    ComponentArrived,
    ComponentFailed,
    ComponentLeft,
    ObservedEvent,
    PassEnded,
)
from streamflow.stages.observers import Broadcast
from streamflow.stages.retention import Reason, Retention
from streamflow.stages.retention_observer import RetentionObserver
from streamflow.stages.testing.walker import open_device

pytestmark = pytest.mark.anyio

TOTAL = 1000
PASS_ENDED = PassEnded(1, True, CpuEvent("compute"))


class ScriptedDevice(CpuDevice):
    """A device whose allocator keeps what the script says; a release empties it."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: int | None = 0
        self.free_bytes: int | None = 500
        self.failure: Exception | None = None
        self.num_releases = 0

    def memory(self) -> MemoryReading:
        if self.failure is not None:
            raise self.failure
        return MemoryReading(3, 5, self.cached, self.free_bytes, TOTAL)

    def release_cache(self) -> None:
        self.num_releases += 1


@attrs.define(eq=False)
class Bench:
    """An observer on a scripted device, and what it decided."""

    device: ScriptedDevice
    broadcast: Broadcast
    observer: RetentionObserver
    decisions: MemoryObjectReceiveStream[ObservedEvent]
    failures: list[BaseException]
    busy: list[bool]

    async def decided(self) -> Retention:
        event = await self.decisions.receive()
        assert isinstance(event, CacheDecided)
        return event.retention

    async def at_boundary(self, cached: int | None, staged: int = 0) -> Retention:
        """The decision at one boundary."""
        self.device.cached = cached
        self.broadcast.publish(ComponentArrived("vae", 1, staged))
        return await self.decided()


@asynccontextmanager
async def open_bench() -> AsyncIterator[Bench]:
    device, broadcast, failures, busy = ScriptedDevice(), Broadcast(), list[BaseException](), [False]
    with anyio.fail_after(20):
        async with open_device(device) as crew, anyio.create_task_group() as tasks:
            observer = RetentionObserver(device, crew, broadcast, lambda: busy[0], failures.append)
            tasks.start_soon(observer.serve)
            await anyio.wait_all_tasks_blocked()
            with broadcast.subscribe(kinds=(CacheDecided,)) as decisions:
                yield Bench(device, broadcast, observer, decisions, failures, busy)
            observer.stop()


async def releases(bench: Bench, cached: Sequence[int]) -> list[bool]:
    return [(await bench.at_boundary(value)).releases for value in cached]


async def test_a_steady_workload_is_flushed_once() -> None:
    async with open_bench() as bench:
        assert await releases(bench, [0, 80, 80, 80, 80]) == [False, True, False, False, False]
        assert bench.device.num_releases == 1


async def test_a_growing_workload_is_flushed_once_for_each_step() -> None:
    async with open_bench() as bench:
        assert await releases(bench, [80, 80, 120, 120]) == [True, False, True, False]
        assert bench.device.num_releases == 2


async def test_a_decision_is_an_event_with_all_that_it_was_made_of() -> None:
    async with open_bench() as bench:
        decided = await bench.at_boundary(80, staged=42)
        reading = attrs.asdict(decided.reading)
        assert reading == {"staged": 42, "peak": 5, "cached": 80, "free": 500, "total": TOTAL}
        assert (decided.budget, decided.cap, decided.reason, decided.deferred) == (0, 250, Reason.OVER_BUDGET, False)


async def test_missing_telemetry_releases() -> None:
    async with open_bench() as bench:
        assert (await bench.at_boundary(None)).reason is Reason.TELEMETRY_MISSING
        bench.device.free_bytes = None
        assert (await bench.at_boundary(0)).reason is Reason.TELEMETRY_MISSING
        assert bench.device.num_releases == 2


async def test_little_free_memory_releases() -> None:
    async with open_bench() as bench:
        bench.device.free_bytes = 49
        assert (await bench.at_boundary(0)).reason is Reason.LOW_FREE_MEMORY
        assert bench.device.num_releases == 1


async def test_a_release_waits_until_no_pass_runs() -> None:
    async with open_bench() as bench:
        bench.busy[0] = True
        bench.device.cached = 80
        bench.broadcast.publish(ComponentLeft("vae", 1, 0))
        bench.broadcast.publish(PASS_ENDED)
        await anyio.wait_all_tasks_blocked()
        assert bench.device.num_releases == 0
        bench.busy[0] = False
        bench.broadcast.publish(PASS_ENDED)
        decided = await bench.decided()
        assert (decided.releases, decided.deferred, decided.reason) == (True, True, Reason.OVER_BUDGET)
        bench.broadcast.publish(PASS_ENDED)
        await anyio.wait_all_tasks_blocked()
        assert bench.device.num_releases == 1


async def test_keeping_is_not_deferred() -> None:
    async with open_bench() as bench:
        bench.busy[0] = True
        assert not (await bench.at_boundary(0)).releases


@pytest.mark.parametrize("busy", [True, False])
async def test_a_failure_releases_at_once_whatever_runs(busy: bool) -> None:
    async with open_bench() as bench:
        bench.busy[0] = busy
        bench.broadcast.publish(ComponentFailed("vae", RuntimeError(), 7))
        decided = await bench.decided()
        assert (decided.reason, decided.deferred, decided.reading.staged) == (Reason.FAILURE, False, 7)
        assert bench.device.num_releases == 1


async def test_a_forced_release_makes_a_deferred_one_needless() -> None:
    async with open_bench() as bench:
        bench.busy[0] = True
        bench.device.cached = 80
        bench.broadcast.publish(ComponentLeft("vae", 1, 0))
        await anyio.wait_all_tasks_blocked()
        await bench.observer.release_now(Reason.OUT_OF_MEMORY, 0)
        assert (await bench.decided()).reason is Reason.OUT_OF_MEMORY
        bench.busy[0] = False
        bench.broadcast.publish(PASS_ENDED)
        await anyio.wait_all_tasks_blocked()
        assert bench.device.num_releases == 1


async def test_a_device_that_fails_is_told() -> None:
    async with open_bench() as bench:
        bench.device.failure = RuntimeError("the driver is gone")
        bench.broadcast.publish(ComponentLeft("vae", 1, 0))
        await anyio.wait_all_tasks_blocked()
        assert bench.failures == [bench.device.failure]


async def test_what_was_learned_is_forgotten_at_the_end() -> None:
    async with open_bench() as bench:
        await bench.at_boundary(80)
        assert bench.observer.budget == 100
    assert bench.observer.budget == 0
