"""A toy pipeline: an encoder, a transformer of blocks and a VAE, all of few kilobytes, called as real ones are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.streamflow.kit import aligned_reference
from tests.streamflow.models import seeded

WIDTH = 16
NUM_BLOCKS = 4


class Encoder(nn.Module):
    """Has a tied weight under two names, a table that is in no checkpoint, and a part that others call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.final_norm = nn.LayerNorm(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return self.head(hidden) @ self.embedding.weight


class Transformer(nn.Module):
    """Blocks, and a projection outside of them."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(num_blocks)
        )

    def forward(self, latents: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        hidden = self.project(latents + text.mean(0))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class Vae(nn.Module):
    """Is never called as a whole; its statistics are read from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.register_buffer("latents_mean", torch.linspace(0, 1, WIDTH))

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.encoder(pixels)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(latents)


class ToyPipeline:
    """Calls its components as pipelines do: encode, some steps, decode."""

    model_cpu_offload_seq = "text_encoder->transformer->transformer_2->vae"

    def __init__(self, **components: nn.Module) -> None:
        self.components = components
        self.between: Callable[[str], None] = lambda what: None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["components"][name]
        except KeyError:
            raise AttributeError(name) from None

    @torch.no_grad()
    def __call__(self, tokens: list[int], num_steps: int = 3, seed: int | None = None) -> torch.Tensor:
        text = self.text_encoder(torch.tensor(tokens))
        latents = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        if seed is not None:
            latents = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed))
        for step in range(num_steps):
            self.between(f"step {step}")
            expert = self.components.get("transformer_2") if step >= 2 else None
            latents = latents - 0.1 * (expert or self.transformer)(latents, text)
        self.between("decode")
        return self.vae.decode(latents + self.vae.latents_mean)


def toy_pipeline(*, experts: int = 1, more: dict[str, nn.Module] | None = None) -> ToyPipeline:
    """The same pipeline every time, with aligned weights."""

    def build() -> nn.Module:
        transformers = {("transformer", "transformer_2")[i]: Transformer() for i in range(experts)}
        return nn.ModuleDict({"text_encoder": Encoder(), **transformers, "vae": Vae(), **(more or {})})

    return ToyPipeline(**{name: aligned_reference(part) for name, part in seeded(build).named_children()})
