"""What a checkpoint must provide for a module."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import nn

from streamflow.binding.inventory import dtype_name, spec_of
from streamflow.stages.layout import TensorSpec
from streamflow.weights.checkpoint_plan import Needed


def needed_tensors(model: nn.Module) -> list[Needed]:
    """Every parameter and persistent buffer, each once, with all its names and those that share its memory."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    names.setdefault(id(tensor), []).append(f"{path}.{key}" if path else key)
                    tensors[id(tensor)] = tensor
    overlaps = _overlaps(spec_of(own[0], tensors[key]) for key, own in names.items())
    return [_needed(tensors[key], list(dict.fromkeys(own)), overlaps[own[0]]) for key, own in names.items()]


def never_computed(model: nn.Module) -> list[str]:
    """What is wrong with each buffer of a skeleton that no file holds and that was filled in uninitialised memory."""
    persistent = {name for tensor in needed_tensors(model) for name in tensor.names}
    return [
        f"nothing gives the non-persistent buffer {name} its values"
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name not in persistent
    ]


def _overlaps(specs: Iterable[TensorSpec]) -> dict[str, tuple[str, ...]]:
    """For each tensor the others that share memory with it, by their first names."""
    by_storage: dict[Hashable, list[TensorSpec]] = {}
    for spec in specs:
        by_storage.setdefault(spec.name if spec.storage is None else spec.storage, []).append(spec)
    return {
        spec.name: tuple(other.name for other in together if other is not spec and _share(spec, other))
        for together in by_storage.values()
        for spec in together
    }


def _share(first: TensorSpec, second: TensorSpec) -> bool:
    start = max(first.storage_offset_bytes, second.storage_offset_bytes)
    return start < min(spec.storage_offset_bytes + spec.span_bytes for spec in (first, second))


def _needed(tensor: torch.Tensor, names: list[str], overlaps: tuple[str, ...]) -> Needed:
    return Needed(
        name=names[0],
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        kind="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
        aliases=tuple(names[1:]),
        overlaps=overlaps,
    )
