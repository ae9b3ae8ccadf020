"""What an unbound tensor shows: one poison element, seen through zero strides."""

from __future__ import annotations

import torch

#: NaN in every floating-point dtype, -1 or the maximum in integers.
_POISON_BYTE = 0xFF
_LARGEST_ELEMENT_BYTES = 16


class Poison:
    """Placeholders on one device: the shape and dtype of what they stand for, and no memory of their own."""

    def __init__(self, device: torch.device) -> None:
        self._elements = torch.full((_LARGEST_ELEMENT_BYTES,), _POISON_BYTE, dtype=torch.uint8, device=device)
        self._true = torch.ones(1, dtype=torch.bool, device=device)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A placeholder for ``tensor``. Reading it gives poison; writing it fails where it has several elements."""
        element = self._true if tensor.dtype == torch.bool else self._elements.view(tensor.dtype)[:1]
        if tensor.numel() == 0:
            return element.new_empty(tensor.shape)
        return element.as_strided(tensor.shape, (0,) * tensor.ndim)
