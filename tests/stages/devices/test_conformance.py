"""What every device promises: the same tests on all of them."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import pytest
import torch

from streamflow.stages.devices.base import Device, Located
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceMemoryError, DeviceStreamError
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.layout import ALIGNMENT_BYTES
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.walker import open_device

pytestmark = pytest.mark.anyio

NBYTES = 1000


def host(value: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def values_in(buffer: torch.Tensor) -> set[int]:
    return set(buffer.cpu().tolist())


def _increment(buffer: torch.Tensor) -> None:
    buffer.add_(1)


async def test_copies_on_one_stream_happen_in_order(device: Device) -> None:
    async with open_device(device) as crew:
        buffer = device.allocate(NBYTES)
        stream = device.open_copy_stream("copy")
        for value in range(20):
            stream.copy(buffer, host(value))
        await crew.call(stream.record().wait)
        assert values_in(buffer) == {19}
        device.free(buffer)


async def test_parts_of_page_locked_memory_go_to_their_places_from_any_thread(device: Device) -> None:
    memory = allocate_host(4 * NBYTES)
    async with open_device(device) as crew:
        lock = await crew.call(partial(PageLock, device.registrar, memory))
        stream, buffer = device.open_copy_stream("copy"), Located(device.allocate(4 * NBYTES))
        stream.copy(buffer.tensor, host(0, 4 * NBYTES))

        def copy(index: int) -> None:
            source = Located(memory[index * NBYTES : (index + 1) * NBYTES])
            event = stream.record()
            for value in (11, 1 + index):
                event.wait()
                source.tensor.fill_(value)
                stream.copy_part(buffer, (3 - index) * NBYTES, source, NBYTES - index)
                event = stream.record(event)
            event.wait()
            assert event.is_done()

        for index in range(4):  # each in a thread of its own
            await crew.call(partial(copy, index))
        expected = [value for index in (3, 2, 1, 0) for value in [1 + index] * (NBYTES - index) + [0] * index]
        assert buffer.tensor.tolist() == expected
        await crew.call(lock.release)
        device.free(buffer.tensor)


async def test_an_event_orders_one_stream_after_another(device: Device) -> None:
    async with open_device(device) as crew:
        first, second = device.open_copy_stream("first"), device.open_copy_stream("second")
        buffers = [device.allocate(NBYTES) for _ in range(8)]
        previous = host(3)
        for index, buffer in enumerate(buffers):
            stream, other = (first, second) if index % 2 else (second, first)
            stream.copy(buffer, previous)
            other.wait(stream.record())
            previous = buffer
        last = first.record()
        await crew.call(last.wait)
        assert [values_in(buffer) for buffer in buffers] == [{3}] * 8
        await crew.call(second.record().wait)
        for buffer in buffers:
            device.free(buffer)


async def test_compute_comes_after_the_copy_it_waits_for(device: Device) -> None:
    async with open_device(device) as crew:
        buffer = device.allocate(NBYTES)
        copies, compute = device.open_copy_stream("copy"), device.open_compute_stream("compute")
        seen: list[torch.Tensor] = []
        copies.copy(buffer, host(5))
        arrived = copies.record()

        def run_a_block() -> None:
            compute.wait(arrived)
            compute.begin_block()
            with compute.activate():
                compute.submit(lambda: seen.append(buffer.clone()))
            compute.end_block()
            compute.record().wait()

        await crew.call(run_a_block)
        assert values_in(seen[0]) == {5}
        device.free(buffer)


async def test_a_copy_comes_after_the_compute_it_waits_for(device: Device) -> None:
    async with open_device(device) as crew:
        buffer = device.allocate(NBYTES)
        copies, compute = device.open_copy_stream("copy"), device.open_compute_stream("compute")
        seen: list[torch.Tensor] = []
        copies.copy(buffer, host(5))
        arrived = copies.record()

        def run_a_block() -> None:
            compute.wait(arrived)
            compute.submit(lambda: seen.append(buffer.clone()))

        await crew.call(run_a_block)
        copies.wait(compute.record())
        copies.copy(buffer, host(6))
        await crew.call(copies.record().wait)
        assert values_in(seen[0]) == {5}
        assert values_in(buffer) == {6}
        device.free(buffer)


async def test_communication_comes_after_the_copy_it_waits_for_and_before_who_waits_for_it(device: Device) -> None:
    async with open_device(device) as crew:
        buffer, second = device.allocate(NBYTES), device.allocate(NBYTES)
        copies, communication = device.open_copy_stream("copy"), device.open_communication_stream("communication")
        copies.copy(buffer, host(5))
        communication.wait(copies.record())
        communication.submit(partial(_increment, buffer), NBYTES)
        copies.wait(communication.record())
        copies.copy(second, buffer)
        await crew.call(copies.record().wait)
        assert values_in(second) == {6}
        device.free(buffer)
        device.free(second)


async def test_submitted_work_runs_in_the_streams_turn(device: Device) -> None:
    async with open_device(device) as crew:
        buffer = device.allocate(NBYTES)
        stream = device.open_copy_stream("copy")
        stream.copy(buffer, host(1))
        stream.submit(partial(_increment, buffer), NBYTES)
        second = device.allocate(NBYTES)
        stream.copy(second, buffer)
        stream.copy(buffer, host(9))
        await crew.call(stream.record().wait)
        assert values_in(second) == {2}
        device.free(buffer)
        device.free(second)


async def test_an_event_of_an_idle_stream_happens(device: Device) -> None:
    async with open_device(device) as crew:
        for stream in (device.open_copy_stream("copy"), device.open_compute_stream("compute"), device.caller_stream()):
            event = stream.record()
            await crew.call(event.wait)
            assert event.is_done()
            await crew.call(event.wait)
            stream.wait(event)
            await crew.call(stream.record().wait)


async def test_an_event_stays_done_while_its_stream_goes_on(device: Device) -> None:
    async with open_device(device) as crew:
        buffer = device.allocate(NBYTES)
        stream = device.open_copy_stream("copy")
        stream.copy(buffer, host(1))
        early = stream.record()
        await crew.call(early.wait)
        stream.copy(buffer, host(2))
        assert early.is_done()
        await crew.call(stream.record().wait)
        assert values_in(buffer) == {2}
        device.free(buffer)


async def test_streams_work_from_any_thread(device: Device) -> None:
    async with open_device(device) as crew:
        stream = device.open_copy_stream("copy")
        buffers = [device.allocate(NBYTES) for _ in range(4)]

        def fill(index: int) -> None:
            for value in range(10):
                stream.copy(buffers[index], host(10 * index + value))
            stream.record().wait()

        async with anyio.create_task_group() as task_group:
            for index in range(4):
                task_group.start_soon(crew.call, partial(fill, index))
        assert [values_in(buffer) for buffer in buffers] == [{10 * index + 9} for index in range(4)]
        for buffer in buffers:
            device.free(buffer)


async def test_work_of_the_caller_can_be_waited_for(device: Device) -> None:
    async with open_device(device) as crew:
        buffer = device.allocate(NBYTES)
        caller, copies = device.caller_stream(), device.open_copy_stream("copy")
        caller.copy(buffer, host(7))
        copies.wait(caller.record())
        second = device.allocate(NBYTES)
        copies.copy(second, buffer)
        await crew.call(partial(caller.wait, copies.record()))
        await crew.call(caller.record().wait)
        assert values_in(second) == {7}
        device.free(buffer)
        device.free(second)


async def test_streams_are_never_the_same(device: Device) -> None:
    async with open_device(device):
        streams = [device.open_copy_stream("copy"), *(device.open_compute_stream(str(i)) for i in range(7))]
        streams.append(device.open_communication_stream("communication"))
        raw = {getattr(stream, "raw", stream) for stream in streams}
        assert len(raw) == 9


async def test_buffers_are_aligned_flat_and_counted(device: Device) -> None:
    async with open_device(device):
        sizes = [0, 1, 255, 256, 257, 4096, 100_000]
        buffers = [device.allocate(size) for size in sizes]
        for size, buffer in zip(sizes, buffers, strict=True):
            assert (buffer.dtype, buffer.shape, buffer.device) == (torch.uint8, (size,), device.torch_device)
            assert size == 0 or buffer.data_ptr() % ALIGNMENT_BYTES == 0
        assert device.memory().in_use == device.memory().peak == sum(sizes)
        for buffer in buffers[3:]:
            device.free(buffer)
        assert (device.memory().in_use, device.memory().peak) == (256, sum(sizes))
        for buffer in buffers[:3]:
            device.free(buffer)
        assert device.memory().in_use == 0


async def test_buffers_do_not_overlap(device: Device) -> None:
    async with open_device(device) as crew:
        buffers = [device.allocate(NBYTES) for _ in range(10)]
        stream = device.open_copy_stream("copy")
        for index, buffer in enumerate(buffers):
            stream.copy(buffer, host(index))
        await crew.call(stream.record().wait)
        assert [values_in(buffer) for buffer in buffers] == [{index} for index in range(10)]
        for buffer in buffers:
            device.free(buffer)


async def test_locked_pages_can_be_copied_from_and_are_given_back(device: Device) -> None:
    async with open_device(device) as crew:
        memory = allocate_host(3 * 4096)
        memory.fill_(4)
        lock = PageLock(device.registrar, memory)
        buffer = device.allocate(memory.numel())
        stream = device.open_copy_stream("copy")
        stream.copy(buffer, memory)
        await crew.call(stream.record().wait)
        assert values_in(buffer) == {4}
        lock.release()
        lock.release()
        again = PageLock(device.registrar, memory)
        again.release()
        device.free(buffer)


async def test_closing_twice_is_closing_once(device: Device) -> None:
    async with open_device(device):
        pass
    device.close()


# What a device that models a smaller one promises beyond


@pytest.fixture(params=["cpu", "sim"])
def capped(request: pytest.FixtureRequest) -> Device:
    """A device of 1,000 bytes."""
    return CpuDevice(memory_limit_bytes=1000) if request.param == "cpu" else SimDevice(0, memory_limit_bytes=1000)


async def test_a_cap_is_kept(capped: Device) -> None:
    async with open_device(capped):
        first = capped.allocate(600)
        with pytest.raises(
            DeviceMemoryError, match=r"500 bytes do not fit beside the 600 in use \(limit 1,000\)"
        ) as hit:
            capped.allocate(500)
        assert (hit.value.wanted, hit.value.in_use, hit.value.limit) == (500, 600, 1000)
        assert isinstance(hit.value, MemoryError)
        second = capped.allocate(400)
        memory = capped.memory()
        assert (memory.in_use, memory.peak, memory.free, memory.total) == (1000, 1000, 0, 1000)
        capped.free(first)
        capped.free(second)
        assert capped.memory().free == 1000


# What a device that runs work in Python promises beyond


@pytest.fixture(params=["cpu", "sim-0", "sim-1", "sim-2", "sim-3"])
def python_device(request: pytest.FixtureRequest) -> Device:
    """A device whose submitted work is Python that runs in the stream's turn, so that it can fail there."""
    kind, _, seed = request.param.partition("-")
    return SimDevice(int(seed)) if kind == "sim" else CpuDevice()


def fail() -> None:
    raise OSError("the disk is gone")


async def test_a_failure_surfaces_where_it_is_waited_for(python_device: Device) -> None:
    async with open_device(python_device) as crew:
        stream, other = python_device.open_copy_stream("bad"), python_device.open_copy_stream("good")
        before = stream.record()
        stream.submit(fail)
        after = stream.record()
        await crew.call(before.wait)
        with pytest.raises(DeviceStreamError, match=r"'bad' failed: OSError: the disk is gone") as caught:
            await crew.call(after.wait)
        assert isinstance(caught.value.cause, OSError)
        assert caught.value.__cause__ is caught.value.cause
        assert before.is_done()
        assert not after.is_done()
        await crew.call(other.record().wait)


async def test_work_after_a_failure_is_skipped(python_device: Device) -> None:
    async with open_device(python_device) as crew:
        stream = python_device.open_copy_stream("bad")
        ran: list[str] = []
        stream.submit(fail)
        stream.submit(lambda: ran.append("after"))
        for _ in range(2):
            with pytest.raises(DeviceStreamError):
                await crew.call(stream.record().wait)
        assert ran == []


async def test_a_failure_goes_on_to_who_waits_for_it(python_device: Device) -> None:
    async with open_device(python_device) as crew:
        bad, waiter = python_device.open_copy_stream("bad"), python_device.open_copy_stream("waiter")
        ran: list[str] = []
        bad.submit(fail)
        waiter.wait(bad.record())
        waiter.submit(lambda: ran.append("work that needed it"))
        with pytest.raises(DeviceStreamError, match=r"'waiter'.*'bad'.*the disk is gone") as caught:
            await crew.call(waiter.record().wait)
        assert isinstance(caught.value.cause, OSError)
        assert ran == []


async def test_work_may_block_while_others_queue_more(python_device: Device) -> None:
    async with open_device(python_device) as crew:
        stream, other = python_device.open_copy_stream("blocked"), python_device.open_copy_stream("other")
        entered, gate = threading.Event(), threading.Event()

        def block() -> None:
            entered.set()
            gate.wait()

        stream.submit(block)
        blocked = stream.record()
        waiter = crew.start("streamflow test waiter")
        waiter.submit(blocked.wait)
        waiter.finish()
        await crew.call(entered.wait)
        buffer = python_device.allocate(NBYTES)
        other.copy(buffer, host(8))
        queued = other.record()
        assert not blocked.is_done()
        gate.set()
        await crew.call(queued.wait)
        await crew.call(blocked.wait)
        assert values_in(buffer) == {8}
        python_device.free(buffer)
