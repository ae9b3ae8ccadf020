"""What the cpu device models beyond the protocol: a link, compute units, memory that runs out."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
import torch

from streamflow.stages.devices import cpu
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceMemoryError
from streamflow.stages.testing.walker import open_device

pytestmark = pytest.mark.anyio


async def test_copies_take_their_bytes_over_the_links_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: 0.0, sleep=slept.append))
    device = CpuDevice(link_bytes_per_s=1000.0)
    async with open_device(device) as crew:
        buffer = device.allocate(500)
        stream = device.open_copy_stream("copy")
        stream.copy(buffer, torch.ones(500, dtype=torch.uint8))
        stream.submit(lambda: None, 2000)
        stream.submit(lambda: None)
        await crew.call(stream.record().wait)
        device.free(buffer)
    assert slept == [0.5, 2.0, 0.0]


async def test_ranks_send_to_each_other_over_a_link_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: 0.0, sleep=slept.append))
    device = CpuDevice(link_bytes_per_s=1000.0, peer_bytes_per_s=8000.0)
    entered, gate = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        gate.wait()

    async with open_device(device) as crew:
        copies, communication = device.open_copy_stream("copy"), device.open_communication_stream("communication")
        copies.submit(block, 500)
        await crew.call(entered.wait)
        communication.submit(lambda: None, 2000)  # while the host's link is in use
        await crew.call(communication.record().wait)
        assert slept == [0.25]
        gate.set()
        await crew.call(copies.record().wait)
    assert slept == [0.25, 0.5]


async def test_without_a_link_nothing_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: 0.0, sleep=slept.append))
    device = CpuDevice()
    async with open_device(device) as crew:
        stream = device.open_copy_stream("copy")
        stream.submit(lambda: None, 1 << 40)
        await crew.call(stream.record().wait)
        stream = device.open_communication_stream("communication")
        stream.submit(lambda: None, 1 << 40)
        await crew.call(stream.record().wait)
    assert slept == []


async def test_no_more_blocks_compute_at_once_than_there_are_units() -> None:
    device = CpuDevice(compute_units=1)
    inside, at_once = [0], [0]

    def compute(name: str) -> None:
        stream = device.open_compute_stream(name)
        for _ in range(50):
            stream.begin_block()
            inside[0] += 1
            at_once[0] = max(at_once[0], inside[0])
            threading.Event().wait(0)  # gives the other threads their chance
            inside[0] -= 1
            stream.end_block()

    async with open_device(device) as crew, anyio.create_task_group() as task_group:
        for index in range(4):
            task_group.start_soon(crew.call, partial(compute, f"compute {index}"))
    assert at_once == [1]


@pytest.mark.parametrize("units", [2, None])
async def test_as_many_blocks_compute_at_once_as_there_are_units(units: int | None) -> None:
    device = CpuDevice(compute_units=units)
    both_inside = threading.Barrier(2, timeout=30)

    def compute(name: str) -> None:
        stream = device.open_compute_stream(name)
        stream.begin_block()
        both_inside.wait()
        stream.end_block()

    async with open_device(device) as crew, anyio.create_task_group() as task_group:
        for index in range(2):
            task_group.start_soon(crew.call, partial(compute, f"compute {index}"))
    assert not both_inside.broken


async def test_copy_streams_are_made_while_the_device_is_open() -> None:
    device = CpuDevice()
    for open_stream in (device.open_copy_stream, device.open_communication_stream):
        with pytest.raises(RuntimeError, match="between open and close"):
            open_stream("copy")
    async with open_device(device):
        device.open_copy_stream("copy")
    with pytest.raises(RuntimeError, match="between open and close"):
        device.open_copy_stream("copy")


def test_memory_that_the_host_has_not_is_a_typed_error_and_not_counted() -> None:
    device = CpuDevice()
    with pytest.raises(DeviceMemoryError, match="use fewer window_blocks") as caught:
        device.allocate(1 << 60)
    assert (caught.value.wanted, caught.value.in_use, caught.value.limit) == (1 << 60, 0, None)
    assert device.memory().in_use == 0
