"""What the cuda device does where no test machine may lead it: driver refusals, used-up streams, a failed device.

A small script stands for `torch.cuda`; nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from streamflow.stages.devices.base import Event
from streamflow.stages.devices.cpu import CpuEvent
from streamflow.stages.devices.cuda import CudaDevice, CudaStream
from streamflow.stages.errors import DeviceMemoryError, DeviceStreamError
from tests.stages.devices.cuda_script import POOL_SIZE, FakeCuda, FakeStream


def raw(stream: object) -> FakeStream:
    """The fake under a stream of the device."""
    assert isinstance(stream, CudaStream)
    assert isinstance(stream.raw, FakeStream)
    return stream.raw


def test_the_device_is_the_one_named_or_the_current_one(cuda: FakeCuda) -> None:
    assert CudaDevice().torch_device == torch.device("cuda", 3)
    assert CudaDevice(torch.device("cuda")).torch_device == torch.device("cuda", 3)
    assert CudaDevice(torch.device("cuda", 1)).torch_device == torch.device("cuda", 1)
    assert not CudaDevice.is_host


# Streams


def test_no_stream_is_handed_out_twice(cuda: FakeCuda) -> None:
    device = CudaDevice()
    for _ in range(POOL_SIZE - 5):
        cuda.new_stream(device.torch_device)  # others use the pool too: it wraps around under us
    streams = [device.open_copy_stream("copy"), *(device.open_compute_stream(str(i)) for i in range(20))]
    streams.append(device.open_communication_stream("communication"))
    assert len({raw(stream).cuda_stream for stream in streams}) == 22


def test_streams_stay_apart_while_others_take_from_the_pool_too(cuda: FakeCuda) -> None:
    device = CudaDevice()
    taken = []
    for index in range(POOL_SIZE):
        taken.append(raw(device.open_compute_stream(str(index))).cuda_stream)
        for _ in range(index % 3):
            cuda.new_stream(device.torch_device)
    assert len(set(taken)) == POOL_SIZE


def test_a_pool_used_up_is_a_typed_error(cuda: FakeCuda) -> None:
    device = CudaDevice()
    for index in range(POOL_SIZE):
        device.open_compute_stream(str(index))
    with pytest.raises(DeviceStreamError, match=r"all of torch's pooled streams are taken \(32\)"):
        device.open_copy_stream("copy")


def test_two_devices_of_one_process_share_no_stream(cuda: FakeCuda) -> None:
    devices = [CudaDevice(), CudaDevice()]
    streams = [device.open_copy_stream("copy") for device in devices for _ in range(POOL_SIZE // 2)]
    assert len({raw(stream).cuda_stream for stream in streams}) == POOL_SIZE


def test_closing_gives_the_streams_to_the_next_opening(cuda: FakeCuda) -> None:
    used = []
    for _ in range(3):
        device = CudaDevice()
        used.append([raw(device.open_compute_stream(str(index))) for index in range(POOL_SIZE // 2)])
        device.close()
        device.close()
    assert used[0] == used[1] == used[2]
    assert next(cuda.num_streams) == POOL_SIZE // 2


def test_the_callers_stream_is_the_current_one(cuda: FakeCuda) -> None:
    assert raw(CudaDevice().caller_stream()) is cuda.current


def test_copies_and_work_go_to_their_own_stream(cuda: FakeCuda) -> None:
    device = CudaDevice()
    stream = device.open_copy_stream("copy")
    active: list[FakeStream] = []
    stream.submit(lambda: active.append(cuda.active[-1]))
    with stream.activate():
        active.append(cuda.active[-1])
    assert active == [raw(stream), raw(stream)]
    target = torch.zeros(4, dtype=torch.uint8)
    stream.copy(target, torch.full((4,), 7, dtype=torch.uint8))
    assert target.tolist() == [7] * 4
    assert cuda.active == []


def test_the_stream_is_left_also_when_work_raises(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def stream_context(stream: FakeStream) -> Iterator[None]:
        entered.append("in")
        try:
            yield
        finally:
            entered.append("out")

    monkeypatch.setattr(torch.cuda, "stream", stream_context)
    with pytest.raises(ZeroDivisionError):
        CudaDevice().open_copy_stream("copy").submit(fail)
    assert entered == ["in", "out"]


def fail() -> None:
    raise ZeroDivisionError


# Events


def test_a_stream_waits_for_cuda_events_only(cuda: FakeCuda) -> None:
    device = CudaDevice()
    first, second = device.open_copy_stream("first"), device.open_copy_stream("second")
    second.wait(first.record())
    assert [event.recorded_on for event in raw(second).waited_for] == [raw(first)]
    foreign: Event = CpuEvent("cpu")
    with pytest.raises(TypeError, match="'second' can wait for CUDA events only, not for"):
        second.wait(foreign)


def test_events_block_instead_of_spinning(cuda: FakeCuda) -> None:
    event = CudaDevice().open_copy_stream("copy").record()
    assert event.raw.blocking  # type: ignore[attr-defined]
    event.wait()
    assert event.is_done()


def test_a_failed_device_surfaces_at_every_wait(cuda: FakeCuda) -> None:
    device = CudaDevice()
    stream = device.open_copy_stream("copy")
    event = stream.record()
    raw(stream).failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not event.is_done()
    with pytest.raises(DeviceStreamError, match=r"'copy' failed: RuntimeError: CUDA error") as caught:
        event.wait()
    assert caught.value.__cause__ is raw(stream).failure
    with pytest.raises(DeviceStreamError, match="'copy' failed"):
        stream.wait(device.open_copy_stream("other").record())


# Memory


def test_memory_that_does_not_fit_is_a_typed_error_and_not_counted(cuda: FakeCuda) -> None:
    device = CudaDevice()
    buffer = device.allocate(4000)
    with pytest.raises(DeviceMemoryError, match=r"cuda:3: 7,000 bytes do not fit beside the 4,000 in use") as caught:
        device.allocate(7000)
    assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)
    assert (caught.value.wanted, caught.value.in_use, caught.value.limit) == (7000, 4000, 10_000)
    assert device.memory().in_use == 4000
    device.free(buffer)
    memory = device.memory()
    assert (memory.in_use, memory.peak, memory.cached, memory.free, memory.total) == (0, 4000, 400, 6000, 10_000)


def test_every_stream_waits_for_what_the_allocating_stream_had_queued(cuda: FakeCuda) -> None:
    """Torch may hand out memory whose former user's work is still queued on the stream of the allocating thread."""
    device = CudaDevice()
    before = device.open_copy_stream("before")
    device.allocate(100)
    after = device.open_copy_stream("after")
    for stream in (before, after):
        assert [event.recorded_on for event in raw(stream).waited_for] == [cuda.current]
