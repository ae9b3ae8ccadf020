"""What the engine needs of the model: to point a block's tensors at a slot, and away from it."""

from __future__ import annotations

from typing import Protocol

import torch


class Binder(Protocol):
    """Points the tensors of blocks at device memory.

    The engine calls it on the loop only: `bind` when a block's copy is queued and before any pass is told; `unbind`
    when no pass may be inside the block any more. A block is bound to at most one buffer at a time.
    """

    def bind(self, block: int, place: int, buffer: torch.Tensor) -> None:
        """Point the block's tensors into ``buffer``. ``place`` is the slot's index, or -1 - block for a resident."""

    def unbind(self, block: int) -> None:
        """Point the block's tensors at poison of their shape, so that a use outside a pass cannot go unseen."""
