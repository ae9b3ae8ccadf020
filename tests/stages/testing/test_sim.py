"""The sim device itself: what it may reorder, what it must not, and what it refuses."""

from __future__ import annotations

import threading

import pytest
import torch

from streamflow.stages.devices.cpu import CpuEvent
from streamflow.stages.errors import DeviceStreamError, HostRegistrationError
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.signals import LoopEvent
from streamflow.stages.slots import POISON
from streamflow.stages.testing.queues import Machine, NotYet, SimLeftoverError, SimStuckError
from streamflow.stages.testing.sim import SimDevice, SimStream
from streamflow.stages.testing.walker import open_device

SEEDS = range(200)


def order_of(seed: int, *, ordered: bool) -> tuple[str, ...]:
    """In which order two streams of two pieces of work each happen; ``ordered``: the second stream waits."""
    device = SimDevice(seed)
    a, b = device.open_copy_stream("a"), device.open_copy_stream("b")
    happened: list[str] = []

    def queue(stream: SimStream, name: str) -> None:
        stream.submit(lambda: happened.append(name))

    queue(a, "a1")
    if ordered:
        b.wait(a.record())
    queue(a, "a2")
    queue(b, "b1")
    queue(b, "b2")
    device.drain()
    return tuple(happened)


def test_every_order_that_the_events_allow_comes_and_no_other() -> None:
    free = {order_of(seed, ordered=False) for seed in SEEDS}
    assert free == {
        ("a1", "a2", "b1", "b2"),
        ("a1", "b1", "a2", "b2"),
        ("a1", "b1", "b2", "a2"),
        ("b1", "a1", "a2", "b2"),
        ("b1", "a1", "b2", "a2"),
        ("b1", "b2", "a1", "a2"),
    }
    assert {order_of(seed, ordered=True) for seed in SEEDS} == {order for order in free if order[0] == "a1"}


def test_one_thread_and_one_seed_make_one_order() -> None:
    assert all(order_of(seed, ordered=False) == order_of(seed, ordered=False) for seed in SEEDS)


def test_nothing_happens_before_somebody_looks() -> None:
    device = SimDevice(0)
    stream = device.open_copy_stream("copy")
    happened: list[int] = []
    stream.submit(lambda: happened.append(1))
    event = stream.record()
    assert (happened, device.num_queued("copy")) == ([], 2)
    event.wait()
    assert (happened, device.num_queued("copy")) == ([1], 0)


def test_asking_may_let_the_device_move_or_not() -> None:
    answers = set()
    for seed in SEEDS:
        device = SimDevice(seed)
        answers.add(device.open_copy_stream("copy").record().is_done())
    assert answers == {True, False}


def test_waiting_moves_no_further_than_needed() -> None:
    device = SimDevice(0)
    stream = device.open_copy_stream("copy")
    event = stream.record()
    stream.submit(lambda: None)
    event.wait()
    assert device.num_queued("copy") == 1


def test_an_event_that_cannot_happen_is_an_error_and_not_a_hang() -> None:
    device, other = SimDevice(0), SimDevice(0)
    stream = device.open_copy_stream("copy")
    stream.wait(other.open_copy_stream("elsewhere").record())
    with pytest.raises(SimStuckError, match="'copy' cannot happen any more") as caught:
        stream.record().wait()
    assert caught.value.heads == {"copy": "a wait for 'elsewhere'"}
    with pytest.raises(SimStuckError):
        device.drain()


def test_work_must_not_wait_on_the_host() -> None:
    device = SimDevice(0)
    a, b = device.open_copy_stream("a"), device.open_copy_stream("b")
    a.submit(b.record().wait)
    device.hold("b")
    with pytest.raises(DeviceStreamError, match="must not wait for device events"):
        a.record().wait()


def test_events_of_other_devices_are_refused() -> None:
    stream = SimDevice(0).open_copy_stream("copy")
    with pytest.raises(TypeError, match="'copy' can wait for sim events only"):
        stream.wait(CpuEvent("cpu"))


def test_a_copy_into_another_size_is_refused() -> None:
    device = SimDevice(0)
    with pytest.raises(ValueError, match="a copy of 5 bytes does not fit a target of 4"):
        device.open_copy_stream("copy").copy(torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8))


def test_buffers_are_poisoned_before_and_after() -> None:
    device = SimDevice(0)
    buffer = device.allocate(100)
    assert buffer.tolist() == [POISON] * 100
    buffer.zero_()
    device.free(buffer)
    assert buffer.tolist() == [POISON] * 100


def test_a_buffer_is_freed_once() -> None:
    device = SimDevice(0)
    buffer = device.allocate(100)
    with pytest.raises(ValueError, match="does not hold"):
        device.free(buffer[:50])
    device.free(buffer)
    with pytest.raises(ValueError, match="does not hold"):
        device.free(buffer)
    assert device.memory().in_use == 0


def test_page_locks_can_be_refused() -> None:
    with pytest.raises(HostRegistrationError, match="refused"):
        PageLock(SimDevice(0, can_lock_pages=False).registrar, torch.zeros(10, dtype=torch.uint8))


def test_streams_that_are_not_there_are_not_held() -> None:
    with pytest.raises(KeyError):
        SimDevice(0).hold("copy")


@pytest.mark.anyio
async def test_who_waits_for_a_held_stream_waits_until_it_is_released() -> None:
    device = SimDevice(0)
    async with open_device(device) as crew:
        stream, other = device.open_copy_stream("copy"), device.open_copy_stream("other")
        happened: list[str] = []
        stream.submit(lambda: happened.append("held"))
        device.hold("copy")
        other.submit(lambda: happened.append("other"))
        other.record().wait()
        event = stream.record()
        assert not any(event.is_done() for _ in range(20))
        waiter, done = crew.start("streamflow test waiter"), LoopEvent()
        for job in (event.wait, lambda: happened.append("waiter"), done.set):
            waiter.submit(job)
        assert happened == ["other"]
        device.release("copy")
        await done.wait()
    assert happened == ["other", "held", "waiter"]


@pytest.mark.anyio
async def test_closing_in_use_is_an_error_that_counts_what_is_left() -> None:
    device = SimDevice(0)
    stream = device.open_copy_stream("copy")
    stream.submit(lambda: None)
    stream.record()
    buffer = device.allocate(100)
    lock = PageLock(device.registrar, torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(SimLeftoverError, match="closed with work queued") as caught:
        async with open_device(device):
            pass
    left = caught.value
    assert (left.queued, left.in_use_bytes, left.num_buffers, left.num_page_locks) == ({"copy": 2}, 100, 1, 1)
    device.drain()
    device.free(buffer)
    lock.release()
    device.close()


# Devices of several ranks, and work that waits for others


def test_devices_of_one_machine_are_moved_together_and_close_for_themselves() -> None:
    machine = Machine(0)
    first, second = SimDevice(0, machine=machine), SimDevice(0, machine=machine)
    a, b = first.open_copy_stream("copy"), second.open_copy_stream("copy")
    a.wait(b.record())
    assert (first.num_queued("copy"), second.num_queued("copy")) == (1, 1)
    a.record().wait()
    first.close()
    second.open_copy_stream("late").record()
    first.close()
    with pytest.raises(SimLeftoverError, match="'late': 1"):
        second.close()
    second.drain()
    second.close()


@pytest.mark.parametrize("seed", range(10))
def test_work_that_must_wait_is_done_again_once_it_may_be(seed: int) -> None:
    device = SimDevice(seed)
    waiting, other = device.open_communication_stream("waiting"), device.open_communication_stream("other")
    happened: list[str] = []

    def wait_for_the_other() -> None:
        if "other" not in happened:
            raise NotYet(lambda: "other" in happened)
        happened.append("waiting")

    waiting.submit(wait_for_the_other)
    waiting.submit(lambda: happened.append("behind it"))
    done = waiting.record()
    other.submit(lambda: happened.append("other"))
    done.wait()
    assert happened == ["other", "waiting", "behind it"]
    device.drain()
    device.close()


def test_who_waits_for_work_that_waits_is_woken_from_outside() -> None:
    machine = Machine(0)
    device = SimDevice(0, machine=machine)
    stream = device.open_communication_stream("communication")
    may_go: list[bool] = []
    tried = threading.Event()

    def work() -> None:
        tried.set()
        if not may_go:
            raise NotYet(lambda: bool(may_go))

    stream.submit(work)
    waiter = threading.Thread(target=stream.record().wait)
    waiter.start()
    tried.wait()
    may_go.append(True)
    machine.look_again()
    waiter.join()
    device.close()
