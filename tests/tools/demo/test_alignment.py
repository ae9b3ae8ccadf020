"""A resident model's weights, moved to where a slot would have them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceMemoryError
from streamflow.stages.layout import ALIGNMENT_BYTES
from streamflow.tools.demo.alignment import align_weights


def odd_model() -> nn.Sequential:
    """Parameters that begin anywhere, one of them transposed, two of them the same."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(3, 5))
    for parameter in model.parameters():
        memory = torch.randn(parameter.numel() + 1)
        parameter.data = memory[1:].view(parameter.shape)
    weight = model.get_parameter("1.weight")
    weight.data = weight.data.t().contiguous().t()
    model[2].weight = model[0].weight
    return model.requires_grad_(False)


def test_values_objects_and_strides_stay_and_addresses_are_aligned() -> None:
    model, device = odd_model(), CpuDevice()
    before = {name: (id(p), p.clone(), p.stride()) for name, p in model.named_parameters(remove_duplicate=False)}
    assert any(p.data_ptr() % ALIGNMENT_BYTES for p in model.parameters())
    align_weights(model, device)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        identity, values, stride = before[name]
        assert (id(parameter), parameter.stride()) == (identity, stride)
        assert torch.equal(parameter, values)
        assert parameter.data_ptr() % ALIGNMENT_BYTES == 0
    assert model[2].weight is model[0].weight
    assert device.memory().in_use == 5 * ALIGNMENT_BYTES


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(DeviceMemoryError, match="256 bytes do not fit beside the 512 in use"):
        align_weights(odd_model(), CpuDevice(memory_limit_bytes=600))
