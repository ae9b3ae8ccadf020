"""What the cuda device does where no test machine may lead it: driver refusals, used-up streams, a failed device.

A small script stands for `torch.cuda`; nothing here needs a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch

from streamflow.stages.devices import cuda as cuda_module
from streamflow.stages.devices.base import Event
from streamflow.stages.devices.cpu import CpuEvent
from streamflow.stages.devices.cuda import CudaDevice, CudaPageLock, CudaStream
from streamflow.stages.errors import DeviceMemoryError, DeviceStreamError

#: Streams that torch hands out in turn, for each device and priority.
POOL_SIZE = 32


@attrs.define(eq=False)
class FakeStream:
    """A stream of torch's pool: ``cuda_stream`` is its handle."""

    cuda_stream: int
    waited_for: list[FakeEvent] = attrs.field(factory=list)
    failure: RuntimeError | None = None

    def wait_event(self, event: FakeEvent) -> None:
        if self.failure is not None:
            raise self.failure
        self.waited_for.append(event)


@attrs.define(eq=False)
class FakeEvent:
    """An event that has happened, unless its stream failed."""

    blocking: bool = False
    recorded_on: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        self._check()
        return True

    def synchronize(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.recorded_on is not None and self.recorded_on.failure is not None:
            raise self.recorded_on.failure


@attrs.define(eq=False)
class FakeRuntime:
    """The calls of the CUDA runtime that we make ourselves, what they are to return, and the error it keeps."""

    register_code: int = 0
    unregister_code: int = 0
    pending: int | None = None
    calls: list[tuple[str, int, int]] = attrs.field(factory=list)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes))
        self.pending = self.register_code or None
        return self.register_code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        self.pending = self.unregister_code or None
        return self.unregister_code


@attrs.define(eq=False)
class FakeCuda:
    """One device: a pool of streams, a current stream, free memory and what is active."""

    runtime: FakeRuntime = attrs.field(factory=FakeRuntime)
    free_bytes: int = 10_000
    current: FakeStream = attrs.field(factory=lambda: FakeStream(0))
    active: list[FakeStream] = attrs.field(factory=list)
    num_streams: Iterator[int] = attrs.field(factory=itertools.count)

    def new_stream(self, device: torch.device) -> FakeStream:
        assert device == torch.device("cuda", 3)
        return FakeStream(1000 + next(self.num_streams) % POOL_SIZE)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.active.append(stream)
        yield
        self.active.pop()

    def empty(self, nbytes: int, *, device: torch.device | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        assert device in (torch.device("cuda", 3), "cuda")
        if self.runtime.pending is not None:  # simpler than in truth, where the launch after it raises
            pending, self.runtime.pending = self.runtime.pending, None
            raise RuntimeError(f"CUDA error: {pending}")
        if nbytes > self.free_bytes:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.free_bytes -= nbytes
        return REAL_EMPTY(nbytes, dtype=dtype)


REAL_EMPTY = torch.empty


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The script, in the place of `torch.cuda`."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda_module, "_STREAMS", cuda_module._StreamRegistry())
    monkeypatch.setattr(torch, "empty", fake.empty)
    for name, value in {
        "Event": FakeEvent,
        "Stream": fake.new_stream,
        "stream": fake.stream,
        "current_stream": lambda device: fake.current,
        "current_device": lambda: 3,
        "cudart": lambda: fake.runtime,
        "mem_get_info": lambda device: (fake.free_bytes, 10_000),
        "memory_reserved": lambda device: 700,
        "memory_allocated": lambda device: 300,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


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


# Host registration


def test_a_range_is_registered_whole_and_unregistered_by_its_base_once(cuda: FakeCuda) -> None:
    memory = torch.zeros(8192, dtype=torch.uint8)
    lock = CudaDevice().lock_pages(memory)
    assert cuda.runtime.calls == [("register", memory.data_ptr(), 8192)]
    lock.release()
    lock.release()
    assert cuda.runtime.calls[1:] == [("unregister", memory.data_ptr(), 0)]


def test_a_refused_registration_is_a_typed_error_with_the_numbers(cuda: FakeCuda) -> None:
    cuda.runtime.register_code = 801
    with pytest.raises(DeviceStreamError, match="cudaHostRegister of 8,192 bytes returned 801"):
        CudaPageLock(torch.zeros(8192, dtype=torch.uint8))
    assert [call for call, *_ in cuda.runtime.calls] == ["register"]


def test_a_refused_registration_is_not_told_again_to_the_next_who_computes_in_the_thread(cuda: FakeCuda) -> None:
    cuda.runtime.register_code = 712
    device = CudaDevice()
    with pytest.raises(DeviceStreamError, match="returned 712"):
        device.lock_pages(torch.zeros(8192, dtype=torch.uint8))
    assert cuda.runtime.pending is None
    device.allocate(100)


def test_a_refused_unregistration_keeps_the_lock_so_that_it_can_be_tried_again(cuda: FakeCuda) -> None:
    lock = CudaPageLock(torch.zeros(8192, dtype=torch.uint8))
    cuda.runtime.unregister_code = 713
    for _ in range(2):
        with pytest.raises(DeviceStreamError, match="cudaHostUnregister of 8,192 bytes returned 713"):
            lock.release()
    cuda.runtime.unregister_code = 0
    lock.release()
    lock.release()
    assert [call for call, *_ in cuda.runtime.calls] == ["register", "unregister", "unregister", "unregister"]


# Streams


def test_no_stream_is_handed_out_twice(cuda: FakeCuda) -> None:
    device = CudaDevice()
    for _ in range(POOL_SIZE - 5):
        cuda.new_stream(device.torch_device)  # others use the pool too: it wraps around under us
    streams = [device.open_copy_stream("copy"), *(device.open_compute_stream(str(i)) for i in range(20))]
    assert len({raw(stream).cuda_stream for stream in streams}) == 21


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
