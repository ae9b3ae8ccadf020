"""What a checkpoint must provide for a module."""

from __future__ import annotations

import torch
from torch import nn

from streamflow.binding.inventory import dtype_name
from streamflow.weights.checkpoint_plan import Needed


def needed_tensors(model: nn.Module) -> list[Needed]:
    """Every parameter and persistent buffer, each once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    names.setdefault(id(tensor), []).append(f"{path}.{key}" if path else key)
                    tensors[id(tensor)] = tensor
    return [_needed(tensors[key], list(dict.fromkeys(own))) for key, own in names.items()]


def _needed(tensor: torch.Tensor, names: list[str]) -> Needed:
    return Needed(
        name=names[0],
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        kind="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
        aliases=tuple(names[1:]),
    )
