"""A model without its weights: built on the meta device, and lent placeholders while it streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from streamflow.binding.poison import Poison

#: Functions that return uninitialised memory. Nobody can depend on its contents, so it need not exist.
_UNINITIALISED = {torch.empty, torch.empty_strided, torch.empty_like, torch.Tensor.new_empty}


class _EmptyOnMeta(TorchFunctionMode):
    """Uninitialised tensors go to the meta device; computed ones (position tables, say) are made as ever.

    A mode of the calling thread alone: other threads build what they like meanwhile.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _UNINITIALISED:
            kwargs["device"] = "meta"
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def build_skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` returns, with its parameters on the meta device; buffers that it computes are real.

    :raises TypeError: if ``build`` returns no module.
    """
    with torch.inference_mode(False), _EmptyOnMeta():
        model = build()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build must return a torch.nn.Module, not {type(model).__name__}")
    return model


@contextmanager
def lend_placeholders(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """While it is open, every meta tensor of ``model`` is replaced by a placeholder of its kind on the CPU.

    Yields the placeholders by the ``id`` of the meta tensor each stands for. On leaving the meta tensors are back, so
    that a use of the model without its weights fails instead of giving numbers.
    """
    poison = Poison(torch.device("cpu"))
    lent: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if tensor is not None and tensor.is_meta:
                    places.append((holder, key, tensor))
                    lent.setdefault(id(tensor), _placeholder(tensor, poison))
    for holder, key, tensor in places:
        holder[key] = lent[id(tensor)]
    try:
        yield lent
    finally:
        for holder, key, tensor in places:
            holder[key] = tensor


def _placeholder(tensor: torch.Tensor, poison: Poison) -> torch.Tensor:
    shown = poison.like(tensor)
    if isinstance(tensor, nn.Parameter):
        shown = nn.Parameter(shown, requires_grad=tensor.requires_grad)
        shown.__dict__.update(vars(tensor))
    return shown
