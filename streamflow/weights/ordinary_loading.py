"""Loading a checkpoint the ordinary way: every tensor is read, converted to the module's dtype and put into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from streamflow.errors import CheckpointUnusableError
from streamflow.weights.checkpoint import Checkpoint
from streamflow.weights.checkpoint_plan import CheckpointFallback, Needed
from streamflow.weights.needed import needed_tensors, never_computed
from streamflow.weights.tensor_reading import read_tensor


def load_ordinarily(skeleton: nn.Module, checkpoint: Checkpoint, fallback: CheckpointFallback) -> nn.Module:
    """``skeleton`` with its weights: one tensor for all names of a tied one. Blocks; for worker threads.

    :raises CheckpointUnusableError: if names or shapes do not match, or a non-persistent buffer was never computed.
    """
    needed = needed_tensors(skeleton)
    uncomputed = (f"{problem} (pass load=)" for problem in never_computed(skeleton))
    problems = [*_mismatches(needed, checkpoint), *uncomputed]
    if problems:
        raise CheckpointUnusableError(checkpoint.path, fallback.code, fallback.reason, "; ".join(problems))
    loaded = {name: _read(tensor, checkpoint) for tensor in needed for name in tensor.names[:1]}
    first_names = {name: tensor.name for tensor in needed for name in tensor.names}
    made: dict[str, torch.Tensor] = {}
    for path, module in skeleton.named_modules(remove_duplicate=False):
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for holder in holders:
            for key, old in holder.items():
                first = first_names.get(f"{path}.{key}" if path else key)
                if old is not None and first is not None:
                    holder[key] = made.setdefault(first, _like(old, loaded[first]))
    return skeleton


def _mismatches(needed: list[Needed], checkpoint: Checkpoint) -> Iterator[str]:
    known = {name: tensor for tensor in needed for name in tensor.names}
    missing = [tensor.name for tensor in needed if not any(name in checkpoint.tensors for name in tensor.names)]
    unexpected = [name for name in checkpoint.tensors if name not in known]
    if missing:
        yield f"the files lack {_some(missing)}"
    if unexpected:
        yield f"the model has no {_some(unexpected)}"
    for name, tensor in checkpoint.tensors.items():
        if name in known and tensor.entry.shape != known[name].shape:
            found, wanted = list(tensor.entry.shape), list(known[name].shape)
            yield f"{name} has the shape {found} in the file and {wanted} in the model"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _read(needed: Needed, checkpoint: Checkpoint) -> torch.Tensor:
    source = next(checkpoint.tensors[name] for name in needed.names if name in checkpoint.tensors)
    return read_tensor(source.file, source.entry).to(getattr(torch, needed.dtype))


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
