"""The devices that the engine's tests run on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.testing.sim import SimDevice

MakeDevice = Callable[[], Device]


def _make(kind: str) -> Device:
    name, _, seed = kind.partition("-")
    if name == "sim":
        return SimDevice(int(seed))
    return CudaDevice() if name == "cuda" else CpuDevice()


@pytest.fixture(params=["cpu", "sim-0", "sim-1", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """A fresh device, not opened: one of each backend, the sim device in several orders."""
    return _make(request.param)
