"""What an entry holds of a model, and what it cannot hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from streamflow.binding.inventory import take_inventory
from streamflow.discovery import find_blocks
from streamflow.host_weights.errors import NotStorableError
from streamflow.host_weights.ownership import FIXED, Ownership, check_boundary, ownership_of
from streamflow.store.codes import StoreCode
from tests.streamflow.models import Mlp, Stack, TwoStacks, seeded


def of(model: nn.Module) -> Ownership:
    return ownership_of(model, take_inventory(model, find_blocks(model)))


def stack() -> Stack:
    model = seeded(lambda: Stack(Mlp() for _ in range(3)))
    assert isinstance(model, Stack)
    return model


def test_every_tensor_is_in_one_image_blocks_first() -> None:
    model = seeded(TwoStacks)
    ownership = of(model)
    assert [image.role for image in ownership.images] == ["block"] * (len(ownership.images) - 1) + ["fixed"]
    assert ownership.images[-1].name == FIXED
    names = [name for image in ownership.images for tensor in image.tensors for name in (tensor.name, *tensor.aliases)]
    everything = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert sorted(names) == sorted(name for name, _ in everything)


def test_a_tied_tensor_is_stored_once_and_its_other_names_are_aliases() -> None:
    model = stack()
    model.blocks[1].norm.bias = model.blocks[1].down.bias
    stored = {tensor.name: tensor for tensor in of(model).images[1].tensors}
    assert stored["blocks.1.norm.bias"].aliases == ("blocks.1.down.bias",)
    assert "blocks.1.down.bias" not in stored


def test_two_parameters_over_the_same_memory_are_one_tensor() -> None:
    model = stack()
    model.blocks[0].norm.bias = nn.Parameter(model.blocks[0].down.bias.data, requires_grad=False)
    stored = {tensor.name: tensor for tensor in of(model).images[0].tensors}
    assert stored["blocks.0.norm.bias"].aliases == ("blocks.0.down.bias",)


def test_a_skeleton_owns_what_the_loaded_model_owns() -> None:
    with torch.device("meta"):
        skeleton = Stack(Mlp() for _ in range(3))
    assert of(skeleton).images == of(stack()).images


def expand(model: Stack) -> None:
    model.blocks[0].up.bias.data = model.blocks[0].up.bias.data[:1].expand(16)


def overlap(model: Stack) -> None:
    memory = torch.zeros(20)
    model.blocks[0].up.bias.data, model.blocks[0].down.bias.data = memory[:16], memory[4:]


def leave_holes(model: Stack) -> None:
    model.blocks[0].up.bias.data = torch.zeros(32)[::2]


@pytest.mark.parametrize("change", [expand, overlap, leave_holes])
def test_a_tensor_without_a_dense_form_of_its_own_is_refused_by_name(change: Callable[[Stack], None]) -> None:
    model = stack()
    change(model)
    with pytest.raises(NotStorableError, match=r"blocks\.0\.(up|down)\.bias") as caught:
        of(model)
    assert caught.value.code is StoreCode.UNSUPPORTED_TENSOR


def test_sharing_with_another_module_is_refused_and_sharing_inside_is_not() -> None:
    model = stack()
    model.blocks[0].norm.bias = model.blocks[2].norm.bias
    inventory = take_inventory(model, find_blocks(model))
    check_boundary(inventory, [stack()])
    other = nn.Linear(16, 16)
    other.bias = model.blocks[0].norm.bias
    with pytest.raises(NotStorableError, match=r"blocks\.0\.norm\.bias.*bias of another module") as caught:
        check_boundary(inventory, [other])
    assert caught.value.code is StoreCode.UNSUPPORTED_ALIAS
