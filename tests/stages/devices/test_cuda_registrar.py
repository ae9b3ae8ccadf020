"""Host registration through the runtime, where the driver refuses or fails; a script stands for it."""

from __future__ import annotations

import pytest
import torch

from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.errors import HostRegistrationError
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.registration.page_lock import PageLock
from tests.stages.devices.cuda_script import FakeCuda

READ_ONLY = 8


def locked(device: CudaDevice | None = None) -> PageLock:
    return PageLock((device or CudaDevice()).registrar, allocate_host(8192))


def test_a_range_is_registered_whole_and_unregistered_by_its_base_once(cuda: FakeCuda) -> None:
    memory = allocate_host(8192)
    lock = PageLock(CudaDevice().registrar, memory)
    assert cuda.runtime.calls == [("register", memory.data_ptr(), 8192, 0)]
    lock.release()
    lock.release()
    assert cuda.runtime.calls[1:] == [("unregister", memory.data_ptr(), 0, 0)]


def test_mappings_are_registered_read_only(cuda: FakeCuda) -> None:
    CudaDevice().registrar.register(4096, 8192, read_only=True)
    assert cuda.runtime.calls == [("register", 4096, 8192, READ_ONLY)]


def test_a_refused_registration_is_a_typed_error_with_the_numbers(cuda: FakeCuda) -> None:
    cuda.runtime.register_code = 801
    with pytest.raises(HostRegistrationError, match="cudaHostRegister of 8,192 bytes returned 801") as caught:
        locked()
    assert (caught.value.call, caught.value.nbytes) == ("cudaHostRegister", 8192)
    assert [call for call, *_ in cuda.runtime.calls] == ["register"]


def test_an_exception_of_the_runtime_is_a_typed_error(cuda: FakeCuda) -> None:
    cuda.runtime.failure = RuntimeError("CUDA error: unknown")
    with pytest.raises(
        HostRegistrationError, match="cudaHostRegister of 8,192 bytes failed: CUDA error: unknown"
    ) as caught:
        locked()
    assert caught.value.__cause__ is cuda.runtime.failure


def test_a_refused_registration_is_not_told_again_to_the_next_who_computes_in_the_thread(cuda: FakeCuda) -> None:
    cuda.runtime.register_code = 712
    device = CudaDevice()
    with pytest.raises(HostRegistrationError, match="returned 712"):
        locked(device)
    assert cuda.runtime.pending is None
    device.allocate(100)


def test_a_refused_unregistration_keeps_the_lock_so_that_it_can_be_tried_again(cuda: FakeCuda) -> None:
    lock = locked()
    cuda.runtime.unregister_code = 713
    for _ in range(2):
        with pytest.raises(HostRegistrationError, match="cudaHostUnregister of 8,192 bytes returned 713"):
            lock.release()
    cuda.runtime.unregister_code = 0
    lock.release()
    lock.release()
    assert [call for call, *_ in cuda.runtime.calls] == ["register", "unregister", "unregister", "unregister"]


def test_what_the_device_takes_for_page_locked_is_asked_of_torch(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def is_pinned(tensor: torch.Tensor) -> bool:
        asked.append(tensor.data_ptr())
        return len(asked) == 1

    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    memory = allocate_host(8192)
    registrar = CudaDevice().registrar
    addresses = [memory.data_ptr(), memory.data_ptr() + 8191]
    assert [registrar.is_page_locked(address) for address in addresses] == [True, False]
    assert asked == addresses
