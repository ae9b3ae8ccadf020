"""What is looked at in the inputs and outputs of components."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from streamflow.binding.blocks import BoundBlock
from streamflow.errors import GradientError


def check_no_gradients(name: str, block: BoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Return if a call of the block, in which gradients are enabled, gives none to compute.

    :raises GradientError: if its weights or its inputs require them.
    """
    inputs = pytree.tree_leaves((args, kwargs))
    if block.requires_grad() or any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in inputs):
        raise GradientError(name)


def has_nan(outputs: Any) -> bool:
    """Whether a floating-point tensor among ``outputs`` has a NaN: what poison makes of all that it touches."""
    tensors = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    return any(t.is_floating_point() and t.element_size() > 1 and bool(t.isnan().any()) for t in tensors)


def on_device(inputs: Any, device: torch.device) -> Any:
    """``inputs`` with every tensor on ``device``: pipelines put some where a component says that it is."""
    leaves, structure = pytree.tree_flatten(inputs)
    if all(not isinstance(leaf, torch.Tensor) or leaf.device == device for leaf in leaves):
        return inputs
    return pytree.tree_unflatten([_moved(leaf, device) for leaf in leaves], structure)


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
