"""The tensors that stay on the device: everything outside the blocks, and what blocks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from streamflow.binding.inventory import OwnedTensor, region_bytes
from streamflow.stages.devices.base import Device
from streamflow.stages.images import view_of
from streamflow.stages.layout import ImageLayout, Region, plan_layout
from streamflow.stages.progress import tracked

#: Fills a region of the device image, given as a flat uint8 slice.
Fill = Callable[[ImageLayout, Region, torch.Tensor], None]


class FixedTensors:
    """One device image of all fixed tensors that are not where they must be.

    ``in_module`` says by name whether the module holds a tensor's real values; on a host device these stay in place.

    Order of use: `load`, `show_device`, `show_host`, `free`; each step may be left out on the way back.
    """

    def __init__(self, tensors: Sequence[OwnedTensor], device: Device, in_module: Callable[[str], bool]) -> None:
        self._device = device
        self._moved = [
            owned for owned in tensors if owned.tensor.device != device.torch_device or not in_module(owned.name)
        ]
        self._host = [owned.tensor.data for owned in self._moved]
        self.layout: ImageLayout = plan_layout(owned.spec for owned in self._moved)
        self._buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Device bytes that the moved tensors take."""
        return self.layout.nbytes

    def load(self, fill: Fill) -> None:
        """Bring the tensors to the device. Blocks; returns when they are there. Nothing is re-pointed yet.

        :raises DeviceMemoryError: if they do not fit.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = self._device.allocate(self.layout.nbytes)
            self._views = [view_of(self._buffer, view) for view in self.layout.views]
            for region in tracked("loading tensors outside blocks", self.layout.regions):
                fill(self.layout, region, self._buffer[region.offset_bytes : region.offset_bytes + region.nbytes])

    def show_device(self) -> None:
        """Point the tensors at the device."""
        for owned, view in zip(self._moved, self._views, strict=True):
            owned.tensor.data = view

    def show_host(self) -> None:
        """Point them back to where they were found."""
        for owned, host in zip(self._moved, self._host, strict=True):
            owned.tensor.data = host

    def free(self) -> None:
        """Give the device memory back. Idempotent."""
        self._views.clear()
        if self._buffer is not None:
            self._device.free(self._buffer)
            self._buffer = None


def fill_from_module(tensors: Sequence[OwnedTensor]) -> Fill:
    """A fill that copies what the module's tensors hold, holes and strides included."""
    by_name = {owned.name: owned.tensor.data for owned in tensors}

    def fill(layout: ImageLayout, region: Region, target: torch.Tensor) -> None:
        target.copy_(region_bytes(region, by_name[region.names[0]]))

    return fill
