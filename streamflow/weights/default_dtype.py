"""Finding what a model computes in torch's default dtype while it is built.

The default dtype belongs to the process: to set it for one build would change what every other thread makes meanwhile.
So where a loader would set it, we only find out whether that could make a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

#: Methods whose name is the dtype of their result.
_NAMED_DTYPES = {torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16}
#: What a module's ``__dict__`` holds that is no plain attribute.
_LISTINGS = ("_parameters", "_buffers", "_modules")


class DefaultDtypeWatch(TorchFunctionMode):
    """Marks every tensor that the calling thread computes in the default dtype, and all that is computed from it.

    A tensor counts as made in the default dtype if it has it, and neither an operand nor an argument asked for it. When
    in doubt a tensor is marked. Marked tensors are kept until the watch is dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = pytree.tree_leaves((args, kwargs))
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(id(operand) in self._marked for operand in operands):
            self._mark(operands)  # one of them may have been written
            self._mark(results)
        elif func not in _NAMED_DTYPES and not any(map(_has_a_dtype, operands)):
            default = torch.get_default_dtype()
            self._mark(tensor for tensor in results if tensor.dtype in (default, default.to_complex()))
        return result

    def _mark(self, leaves: Iterable[Any]) -> None:
        self._marked.update((id(leaf), leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def found_in(self, model: nn.Module) -> list[str]:
        """The marked tensors that ``model`` keeps and no checkpoint fills: other buffers and plain attributes."""
        return [path for path, tensor in _kept_tensors(model) if id(tensor) in self._marked]


def _has_a_dtype(operand: Any) -> bool:
    """Whether a result may have its dtype from this operand: a dtype, an array, or a tensor that is not of integers."""
    if isinstance(operand, torch.Tensor):
        return operand.is_floating_point() or operand.is_complex()
    return isinstance(operand, torch.dtype) or hasattr(operand, "dtype")


def _kept_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if key not in _LISTINGS}
        kept |= {key: module._buffers[key] for key in module._non_persistent_buffers_set}
        for key, value in kept.items():
            tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
            yield from ((f"{path}.{key}" if path else key, tensor) for tensor in tensors)
