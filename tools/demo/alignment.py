"""Aligns a model's weights like those in a slot.

Kernels may choose other code, and other last bits, for other addresses; so a resident model whose outputs are compared
with those of a streamed one has its weights at addresses aligned as a slot's are.
"""

from __future__ import annotations

from torch import nn

from streamflow.binding.inventory import spec_of
from streamflow.stages.devices.base import Device
from streamflow.stages.images import view_of
from streamflow.stages.layout import plan_layout


def align_weights(model: nn.Module, device: Device) -> None:
    """Moves every parameter of ``model`` to memory of ``device``, each at a 256-byte-aligned address.

    The Parameter objects, their values and their strides stay.

    :raises DeviceMemoryError: if they do not fit; the parameters moved so far have moved then.
    """
    for name, parameter in model.named_parameters():
        layout = plan_layout([spec_of(name, parameter)])
        aligned = view_of(device.allocate(layout.nbytes), layout.views[0])
        parameter.data = aligned.copy_(parameter.data)
