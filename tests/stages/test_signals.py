"""The doorbell and the events, rung from threads: nothing is lost, and no loop is harmed."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from streamflow.stages.signals import Doorbell, LoopEvent, ThreadEvent, loop_waker

NUM_THREADS = 8
NUM_RINGS = 500

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def in_threads(*works: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, name=f"test {index}") for index, work in enumerate(works)]
    for thread in threads:
        thread.start()
    return threads


async def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)


def ring_all(doorbell: Doorbell[tuple[int, int]], index: int, start: threading.Barrier) -> Callable[[], None]:
    def work() -> None:
        start.wait()
        for count in range(NUM_RINGS):
            doorbell.ring((index, count))

    return work


# The doorbell


@pytest.mark.anyio
async def test_rings_from_many_threads_all_arrive_in_each_threads_order() -> None:
    doorbell: Doorbell[tuple[int, int]] = Doorbell()
    start = threading.Barrier(NUM_THREADS)
    threads = in_threads(*(ring_all(doorbell, index, start) for index in range(NUM_THREADS)))
    heard: list[tuple[int, int]] = []
    with anyio.fail_after(60):
        while len(heard) < NUM_THREADS * NUM_RINGS:
            heard += await doorbell.wait()
    await join(threads)
    for index in range(NUM_THREADS):
        assert [count for sender, count in heard if sender == index] == list(range(NUM_RINGS))
    assert doorbell.num_late == 0


@pytest.mark.anyio
async def test_a_ring_wakes_a_task_that_waits() -> None:
    doorbell: Doorbell[str] = Doorbell()
    with anyio.fail_after(60):
        for word in ("one", "two", "three"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(check_heard, doorbell, [word])
                await anyio.wait_all_tasks_blocked()
                await join(in_threads(lambda word=word: doorbell.ring(word)))  # type: ignore[misc]


async def check_heard(doorbell: Doorbell[str], expected: list[str]) -> None:
    assert await doorbell.wait() == expected


@pytest.mark.anyio
async def test_messages_come_together_oldest_first_and_once() -> None:
    doorbell: Doorbell[int] = Doorbell()
    for message in range(5):
        doorbell.ring(message)
    with anyio.fail_after(60):
        assert await doorbell.wait() == list(range(5))
        doorbell.ring(5)
        assert await doorbell.wait() == [5]


@pytest.mark.anyio
async def test_what_has_come_when_the_deadline_has_passed_is_told() -> None:
    doorbell: Doorbell[str] = Doorbell()
    assert await doorbell.wait_until(anyio.current_time() - 1) == []
    doorbell.ring("late loop")
    assert await doorbell.wait_until(anyio.current_time() - 1) == ["late loop"]
    doorbell.ring("in time")
    assert await doorbell.wait_until(math.inf) == ["in time"]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await doorbell.wait_until(math.inf)
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_a_cancelled_wait_leaves_the_messages_where_they_are() -> None:
    doorbell: Doorbell[int] = Doorbell()
    doorbell.ring(1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await doorbell.wait()
    assert scope.cancelled_caught
    with anyio.fail_after(60):
        assert await doorbell.wait() == [1]


@pytest.mark.anyio
async def test_waits_that_are_cancelled_while_threads_ring_lose_nothing_and_harm_no_loop() -> None:
    doorbell: Doorbell[tuple[int, int]] = Doorbell()
    start = threading.Barrier(NUM_THREADS)
    threads = in_threads(*(ring_all(doorbell, index, start) for index in range(NUM_THREADS)))
    heard: Counter[tuple[int, int]] = Counter()
    with anyio.fail_after(60):
        while heard.total() < NUM_THREADS * NUM_RINGS:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen_once, doorbell, heard)
                await checkpoint()
                tasks.cancel_scope.cancel()
            heard.update(await doorbell.wait() if heard.total() < NUM_THREADS * NUM_RINGS else [])
    await join(threads)
    assert set(heard.values()) == {1}


async def listen_once(doorbell: Doorbell[tuple[int, int]], heard: Counter[tuple[int, int]]) -> None:
    heard.update(await doorbell.wait())


@pytest.mark.anyio
async def test_what_rings_after_closing_is_counted_and_dropped() -> None:
    doorbell: Doorbell[str] = Doorbell()
    doorbell.ring("in time")
    doorbell.close()
    doorbell.close()
    await join(in_threads(*(lambda: doorbell.ring("late") for _ in range(3))))
    assert doorbell.num_late == 3
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(check_heard, doorbell, [])
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught


@BACKENDS
def test_rings_after_the_loop_is_gone_are_counted_and_raise_nothing(backend: str) -> None:
    async def make() -> Doorbell[int]:
        return Doorbell()

    doorbell = anyio.run(make, backend=backend)
    for thread in in_threads(*(lambda: doorbell.ring(1) for _ in range(3))):
        thread.join()
    doorbell.ring(1)
    assert doorbell.num_late == 4


@pytest.mark.anyio
async def test_a_ring_torn_by_a_signal_handler_does_not_silence_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    doorbell: Doorbell[str] = Doorbell()

    def interrupted(callback: Callable[[], object]) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(doorbell, "_wake_loop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            doorbell.ring("torn")
    with anyio.fail_after(60):
        assert await doorbell.wait() == ["torn"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(check_heard, doorbell, ["after"])
            await anyio.wait_all_tasks_blocked()
            doorbell.ring("after")


# The waker


@pytest.mark.anyio
async def test_the_waker_says_whether_the_loop_is_there() -> None:
    arrived = anyio.Event()
    wake = loop_waker()
    assert wake(arrived.set)
    with anyio.fail_after(60):
        await arrived.wait()


@BACKENDS
def test_the_waker_of_a_loop_that_is_gone_says_so(backend: str) -> None:
    async def make() -> Callable[[Callable[[], object]], bool]:
        return loop_waker()

    assert not anyio.run(make, backend=backend)(lambda: None)


def test_there_is_no_waker_where_no_loop_runs() -> None:
    with pytest.raises(anyio.NoEventLoopError):
        loop_waker()


# Events


@pytest.mark.anyio
async def test_a_loop_event_set_in_a_thread_wakes_all_who_wait_and_those_who_come_later() -> None:
    event = LoopEvent()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(event.wait)
            tasks.start_soon(event.wait)
            await anyio.wait_all_tasks_blocked()
            await join(in_threads(event.set, event.set))
        await event.wait()


@pytest.mark.anyio
async def test_a_cancelled_wait_for_a_loop_event_changes_nothing() -> None:
    event = LoopEvent()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await event.wait()
    assert scope.cancelled_caught
    event.set()
    with anyio.fail_after(60):
        await event.wait()


@BACKENDS
def test_a_loop_event_set_after_the_loop_is_gone_raises_nothing(backend: str) -> None:
    async def make() -> LoopEvent:
        return LoopEvent()

    anyio.run(make, backend=backend).set()


def test_a_thread_event_wakes_its_waiter_whether_set_before_or_after() -> None:
    before, after = ThreadEvent(), ThreadEvent()
    before.set()
    threads = in_threads(before.wait_blocking, after.wait_blocking)
    threads[0].join(60)
    assert not threads[0].is_alive()
    assert threads[1].is_alive()
    after.set()
    threads[1].join(60)
    assert not threads[1].is_alive()
