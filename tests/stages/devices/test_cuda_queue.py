"""Copies and events through the driver: what it is given, and that torch does the rest. A script stands for it."""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import pytest
import torch

from streamflow.stages.devices import cuda as cuda_module
from streamflow.stages.devices import cuda_queue
from streamflow.stages.devices.base import Located
from streamflow.stages.devices.cuda import CudaDevice, CudaStream
from streamflow.stages.devices.cuda_queue import DriverQueue
from tests.stages.devices.cuda_script import FakeCuda, FakeEvent, FakeStream


@attrs.define(eq=False)
class FakeQueue:
    """Stands for the driver's calls, which return ``code``."""

    code: int = 0
    calls: list[tuple[Any, ...]] = attrs.field(factory=list)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.calls.append(("copy", target, source, nbytes, stream))
        return self.code

    def record(self, event: int, stream: int) -> int:
        self.calls.append(("record", event, stream))
        return self.code


@pytest.fixture
def queue(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    fake = FakeQueue()
    monkeypatch.setattr(cuda_module, "driver_queue", lambda: fake)
    return fake


def located(value: int, nbytes: int) -> Located:
    return Located(torch.full((nbytes,), value, dtype=torch.uint8))


def test_a_part_is_copied_by_address_on_the_streams_handle(queue: FakeQueue) -> None:
    stream = CudaDevice().open_copy_stream("copy")
    assert isinstance(stream, CudaStream)
    target, source = located(0, 100), located(7, 50)
    stream.copy_part(target, 30, source, 20)
    assert queue.calls == [("copy", target.address + 30, source.address, 20, stream.raw.cuda_stream)]
    assert set(target.tensor.tolist()) == {0}, "torch copied it again"


def test_what_the_driver_refuses_is_copied_by_torch(queue: FakeQueue) -> None:
    queue.code = 201
    target = located(0, 100)
    CudaDevice().open_copy_stream("copy").copy_part(target, 30, located(7, 50), 20)
    assert target.tensor.tolist() == [0] * 30 + [7] * 20 + [0] * 50


def test_without_a_driver_torch_copies(cuda: FakeCuda) -> None:
    target = located(0, 100)
    CudaDevice().open_copy_stream("copy").copy_part(target, 30, located(7, 50), 20)
    assert target.tensor.tolist() == [0] * 30 + [7] * 20 + [0] * 50


@pytest.mark.parametrize("code", [0, 201])
def test_an_event_is_first_recorded_by_torch_then_by_the_driver_if_it_does(queue: FakeQueue, code: int) -> None:
    stream = CudaDevice().open_copy_stream("copy")
    assert isinstance(stream, CudaStream)
    event = stream.record()
    assert isinstance(event.raw, FakeEvent)
    assert (event.raw.recorded_on, queue.calls) == (stream.raw, [])
    event.raw.recorded_on, queue.code = None, code
    assert stream.record(event) is event
    assert queue.calls == [("record", event.handle, stream.raw.cuda_stream)]
    recorded: FakeStream | None = event.raw.recorded_on
    assert recorded is (stream.raw if code else None)


def test_the_library_keeps_the_interpreter_and_gets_whole_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood for by C functions of the same arguments: memmove gives its first one back, here cut to an int."""
    made: list[str] = []

    class Library:
        def __init__(self, name: str) -> None:
            made.append(name)
            libc = real(None)
            self.cuMemcpyHtoDAsync_v2, self.cuEventRecord = libc.memmove, libc.strcmp

    real = ctypes.PyDLL
    monkeypatch.setattr(ctypes, "PyDLL", Library)
    queue = DriverQueue()
    target, source = located(0, 100), located(7, 100)
    queue.copy(target.address, source.address, 100, 1)
    assert set(target.tensor.tolist()) == {7}
    text = ctypes.create_string_buffer(b"one")
    assert queue.record(ctypes.addressof(text), ctypes.addressof(text)) == 0
    assert made == ["libcuda.so.1"]


@pytest.mark.parametrize("failure", [OSError("no such library"), AttributeError("cuEventRecord")])
def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def refuse(name: str) -> None:
        raise failure

    monkeypatch.setattr(ctypes, "PyDLL", refuse)
    cuda_queue.driver_queue.cache_clear()
    try:
        assert cuda_queue.driver_queue() is None
    finally:
        cuda_queue.driver_queue.cache_clear()
