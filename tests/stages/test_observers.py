"""Observers are told of everything, as far as they keep up, and are never in the way."""

from __future__ import annotations

import anyio
import pytest

from streamflow.stages.events import ObservedEvent, WalkEnded
from streamflow.stages.observers import DEFAULT_CAPACITY, Broadcast

pytestmark = pytest.mark.anyio


def events(num: int) -> list[ObservedEvent]:
    return [WalkEnded(walk_id) for walk_id in range(num)]


async def test_every_observer_is_told_of_every_event_in_order() -> None:
    broadcast = Broadcast()
    with broadcast.subscribe() as one, broadcast.subscribe() as other:
        for event in events(3):
            broadcast.publish(event)
        broadcast.close()
        assert [event async for event in one] == events(3)
        assert [event async for event in other] == events(3)


async def test_an_observer_is_told_of_what_comes_while_it_observes() -> None:
    broadcast = Broadcast()
    first, second, third = events(3)
    broadcast.publish(first)
    with broadcast.subscribe() as channel:
        broadcast.publish(second)
        assert channel.receive_nowait() == second
        with pytest.raises(anyio.WouldBlock):
            channel.receive_nowait()
    broadcast.publish(third)
    with pytest.raises(anyio.ClosedResourceError):
        channel.receive_nowait()


async def test_an_observer_that_lags_behind_loses_the_newest_and_they_are_counted() -> None:
    broadcast = Broadcast()
    with broadcast.subscribe(capacity=2) as slow, broadcast.subscribe() as quick:
        for event in events(5):
            broadcast.publish(event)
        assert broadcast.num_dropped == 3
        broadcast.close()
        assert [event async for event in slow] == events(2)
        assert [event async for event in quick] == events(5)


async def test_the_default_capacity_is_the_stated_one() -> None:
    broadcast = Broadcast()
    with broadcast.subscribe():
        for event in events(DEFAULT_CAPACITY + 1):
            broadcast.publish(event)
    assert broadcast.num_dropped == 1


async def test_what_was_dropped_stays_counted_when_the_observer_leaves_and_when_the_engine_closes() -> None:
    broadcast = Broadcast()
    with broadcast.subscribe(capacity=0):
        broadcast.publish(WalkEnded(1))
    with broadcast.subscribe(capacity=0):
        broadcast.publish(WalkEnded(2))
        broadcast.close()
    assert broadcast.num_dropped == 2


async def test_an_observer_that_closed_its_channel_is_in_nobodys_way() -> None:
    broadcast = Broadcast()
    with broadcast.subscribe() as gone, broadcast.subscribe() as there:
        gone.close()
        broadcast.publish(WalkEnded(1))
        assert there.receive_nowait() == WalkEnded(1)
    assert broadcast.num_dropped == 1


async def test_an_observer_that_fails_is_forgotten() -> None:
    broadcast = Broadcast()
    with pytest.raises(ZeroDivisionError), broadcast.subscribe(capacity=0):
        raise ZeroDivisionError
    assert not broadcast.is_observed
    broadcast.publish(WalkEnded(1))
    assert broadcast.num_dropped == 0


async def test_whether_anybody_listens_is_known() -> None:
    broadcast = Broadcast()
    assert not broadcast.is_observed
    with broadcast.subscribe():
        assert broadcast.is_observed
        broadcast.close()
        broadcast.close()
        assert not broadcast.is_observed
    assert not broadcast.is_observed


async def test_a_waiting_observer_wakes_with_an_event_and_ends_with_the_engine() -> None:
    broadcast = Broadcast()
    heard: list[ObservedEvent] = []

    async def observe() -> None:
        with broadcast.subscribe() as channel:
            async for event in channel:
                heard.append(event)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(observe)
            await anyio.wait_all_tasks_blocked()
            broadcast.publish(WalkEnded(1))
            await anyio.wait_all_tasks_blocked()
            assert heard == [WalkEnded(1)]
            broadcast.close()
