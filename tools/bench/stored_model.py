"""A model of any size with its checkpoint, for the benchmarks of the host weight store."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

#: Bytes of one block's weights.
BLOCK_BYTES = 32 << 20
WIDTH = 4096


class Block(nn.Module):
    """Two linears of 16 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 1024, bias=False)
        self.down = nn.Linear(1024, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return changed


class Model(nn.Module):
    """``num_blocks`` blocks and a small projection outside them."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.proj_in = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return x


def num_blocks_of(nbytes: int) -> int:
    """The blocks of a model of about this size, at least one."""
    return max(1, round(nbytes / BLOCK_BYTES))


def save_model(directory: Path, num_blocks: int) -> int:
    """Write a checkpoint with seeded weights, block by block of memory; returns its bytes. Blocks."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        tensors = Model(num_blocks).state_dict()
    made = {name: torch.rand(tensor.shape, generator=generator).sub_(0.5) for name, tensor in tensors.items()}
    save_file(made, directory / "model.safetensors")
    return sum(tensor.nbytes for tensor in made.values())


def an_input() -> torch.Tensor:
    """An input of the model."""
    return torch.linspace(-1, 1, 64)[None]


def is_host(device: str) -> bool:
    """Whether what is on this device is on the host."""
    return torch.device(device).type == "cpu"
