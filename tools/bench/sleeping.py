"""A model whose blocks sleep instead of computing, so that overlap can be measured on a small shared machine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


class SleepingBlock(nn.Module):
    """Weights of ``nbytes``, and a forward that takes ``compute_s`` within ``unit`` and depends on the weights."""

    def __init__(self, nbytes: int, compute_s: float, unit: AbstractContextManager[object], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._compute_s = compute_s
        self._unit = unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._unit:
            time.sleep(self._compute_s)
            return x * 0.5 + self.weight[: x.numel()].view_as(x) / 256


class SleepingModel(nn.Module):
    """``num_blocks`` of them. ``unit``: what computing occupies (None: nothing, as where the device sees to it)."""

    def __init__(
        self, num_blocks: int, nbytes: int, compute_s: float, unit: AbstractContextManager[object] | None = None
    ) -> None:
        super().__init__()
        held = nullcontext() if unit is None else unit
        self.blocks = nn.ModuleList(SleepingBlock(nbytes, compute_s, held, seed) for seed in range(num_blocks))

    def forward(self, x: torch.Tensor, order: Iterable[int] | None = None) -> torch.Tensor:
        """Run the blocks in ``order``; None: each once, in turn."""
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        return x
