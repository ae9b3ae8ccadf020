"""What only a real CUDA device can show: torch's own allocator, stream pool and host registration."""

from __future__ import annotations

import pytest
import torch

from streamflow.stages.devices.base import Located
from streamflow.stages.devices.cuda import CudaDevice, CudaStream
from streamflow.stages.errors import DeviceMemoryError, HostRegistrationError
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.testing.walker import open_device

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

MIB = 1 << 20


async def test_memory_given_back_by_the_caller_is_not_filled_under_his_queued_work() -> None:
    """Torch hands memory out again while kernels of its former owner are queued; ours must come after them."""
    device = CudaDevice()
    memory = allocate_host(64 * MIB)
    memory.fill_(5)
    async with open_device(device) as crew:
        stream = device.open_copy_stream("copy")
        torch.cuda.empty_cache()
        former = torch.empty(64 * MIB, dtype=torch.uint8, device=device.torch_device)
        address = former.data_ptr()
        torch.cuda._sleep(200_000_000)
        former.fill_(7)
        del former
        buffer = device.allocate(64 * MIB)
        assert buffer.data_ptr() == address
        stream.copy(buffer, memory)
        await crew.call(stream.record().wait)
        await crew.call(device.caller_stream().record().wait)
        assert bool((buffer == 5).all())
        device.free(buffer)


async def test_real_streams_stay_apart() -> None:
    device = CudaDevice()
    async with open_device(device):
        streams = [device.open_copy_stream("copy")]
        for index in range(20):
            torch.cuda.Stream(device.torch_device)  # somebody else takes from the pool
            streams.append(device.open_compute_stream(str(index)))
        handles = {stream.raw.cuda_stream for stream in streams if isinstance(stream, CudaStream)}
        assert len(handles) == len(streams)


async def test_memory_that_the_gpu_has_not_is_a_typed_error() -> None:
    device = CudaDevice()
    async with open_device(device):
        with pytest.raises(DeviceMemoryError, match="use fewer window_blocks"):
            device.allocate(1 << 50)
        assert device.memory().in_use == 0


async def test_a_refused_registration_leaves_the_device_usable() -> None:
    device = CudaDevice()
    memory = allocate_host(MIB)
    async with open_device(device) as crew:
        lock = PageLock(device.registrar, memory)
        assert memory.is_pinned()
        with pytest.raises(HostRegistrationError, match="cudaHostRegister of 1,048,576 bytes"):
            PageLock(device.registrar, memory)
        buffer = device.allocate(MIB)
        stream = device.open_copy_stream("copy")
        stream.copy(buffer, memory)
        stream.submit(lambda: _add_one(buffer))
        await crew.call(stream.record().wait)
        assert bool((buffer == 1).all())
        lock.release()
        assert not memory.is_pinned()
        device.free(buffer)


async def test_after_a_threads_first_copy_the_driver_does_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch, which does a thread's first one; and exactly, in the stream's order."""
    device, by_torch, original = CudaDevice(), [0], CudaStream.copy

    def counted(*args: torch.Tensor) -> None:
        by_torch[0] += 1
        original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaStream, "copy", counted)
    memory = allocate_host(MIB)
    memory.copy_(torch.arange(MIB) % 251)
    async with open_device(device) as crew:
        lock = PageLock(device.registrar, memory)
        stream, buffer = device.open_copy_stream("copy"), Located(device.allocate(4 * MIB))

        def pack() -> None:
            with stream.activate():
                event, source = None, Located(memory)
                for index in range(64):
                    stream.copy_part(buffer, index % 4 * MIB, source, MIB)
                    event = stream.record(event)
                assert event is not None
                event.wait()
                assert event.is_done()

        await crew.call(pack)
        assert by_torch[0] <= 1
        assert all(torch.equal(part, memory) for part in buffer.tensor.cpu().split(MIB))
        lock.release()
        device.free(buffer.tensor)


def _add_one(buffer: torch.Tensor) -> None:
    buffer.add_(1)
