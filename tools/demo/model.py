"""A class-conditional diffusion transformer for 8x8 digits: plain torch modules, small, with most bytes in its blocks.

It predicts the velocity of a rectified flow. On the straight line ``x_t = (1 - t) * digit + t * noise`` the velocity
is ``noise - digit``; ``t`` runs from 0 (a digit) to 1 (noise). Each block is modulated by the time and the class
(adaptive layer norm, starting as the identity). One class more than there are digits, the null class, stands for "any
digit": guidance compares the two.

The model has no buffers, so that every byte of it is a parameter in the checkpoint.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from streamflow.tools.demo.errors import DemoValueError

#: The sinusoids of the time run from one radian per unit of ``TIME_SCALE * t`` down to a ``TIME_PERIOD``-th of it.
TIME_SCALE = 1000.0
TIME_PERIOD = 10000.0


@attrs.frozen(kw_only=True)
class DigitTransformerConfig:
    """The sizes of a ``DigitTransformer``; the defaults are those of the checkpoint that ships with the package.

    :raises DemoValueError: if a size is below one, or does not divide what it must divide.
    """

    image_size: int = 8
    patch_size: int = 2
    width: int = 64
    num_blocks: int = 12
    num_heads: int = 4
    mlp_ratio: int = 2
    num_classes: int = 10

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if type(value) is not int or value < 1:
                raise DemoValueError(name, value, "a whole number of at least 1")
        if self.image_size % self.patch_size:
            raise DemoValueError("patch_size", self.patch_size, f"a divisor of image_size ({self.image_size})")
        if self.width % self.num_heads or self.width % 2:
            raise DemoValueError("width", self.width, f"even and a multiple of num_heads ({self.num_heads})")

    @property
    def null_class(self) -> int:
        """The label that means "any digit"."""
        return self.num_classes

    @property
    def num_tokens(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_values(self) -> int:
        """Pixels of one patch."""
        return self.patch_size**2


class DigitTransformer(nn.Module):
    """Predicts the velocity from a digit towards noise; its ``blocks`` run in their order, each once per call."""

    def __init__(self, config: DigitTransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patch_in = nn.Linear(config.patch_values, width)
        self.position = nn.Parameter(torch.randn(1, config.num_tokens, width) * 0.02)
        self.time_mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label_embedding = nn.Embedding(config.num_classes + 1, width)
        self.blocks = nn.ModuleList(DigitBlock(config) for _ in range(config.num_blocks))
        self.patch_out = PatchOut(config)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """The velocity at ``x``.

        :param x: float[B, 1, S, S], pixels in [-1, 1] mixed with unit noise; S is ``config.image_size``.
        :param t: float[B], 0 for a clean digit to 1 for pure noise.
        :param y: int64[B], the class, or ``config.null_class`` for any.
        :returns: float[B, 1, S, S], a new tensor.
        """
        patches = functional.pixel_unshuffle(x, self.config.patch_size)
        tokens = self.patch_in(patches.flatten(2).transpose(1, 2)) + self.position
        condition = functional.silu(self.time_mlp(self._embed_time(t).to(x.dtype)) + self.label_embedding(y))
        for block in self.blocks:
            tokens = block(tokens, condition)
        patches = self.patch_out(tokens, condition).transpose(1, 2).unflatten(2, patches.shape[2:])
        return functional.pixel_shuffle(patches, self.config.patch_size)

    def _embed_time(self, t: Tensor) -> Tensor:
        half = self.config.width // 2
        exponents = torch.arange(half, dtype=torch.float32, device=t.device) / half
        angles = TIME_SCALE * t.float()[:, None] * torch.exp(-math.log(TIME_PERIOD) * exponents)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


class DigitBlock(nn.Module):
    """One transformer layer; a new one is the identity, because its gates start at zero."""

    def __init__(self, config: DigitTransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.modulation = zero_linear(width, 6 * width)
        self.attention = SelfAttention(width, config.num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, config.mlp_ratio * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.mlp_ratio * width, width),
        )

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Tokens float[B, N, width] under a condition float[B, width]; a new tensor of the tokens' shape."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=2)
        tokens = tokens + gate1 * self.attention(modulate(tokens, shift1, scale1))
        tokens = tokens + gate2 * self.mlp(modulate(tokens, shift2, scale2))
        return tokens


class SelfAttention(nn.Module):
    """Multi-head attention of every token to every token of its image."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens float[B, N, width] to the same shape."""
        query, key, value = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class PatchOut(nn.Module):
    """Turns tokens back into patches; a new one returns zeros."""

    def __init__(self, config: DigitTransformerConfig) -> None:
        super().__init__()
        self.modulation = zero_linear(config.width, 2 * config.width)
        self.linear = zero_linear(config.width, config.patch_values)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Tokens float[B, N, width] to pixels float[B, N, patch_values]."""
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=2)
        patches: Tensor = self.linear(modulate(tokens, shift, scale))
        return patches


def modulate(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm of each token, scaled and shifted by the condition; float[B, 1, width] both."""
    return functional.layer_norm(tokens, tokens.shape[-1:]) * (1 + scale) + shift


def zero_linear(num_in: int, num_out: int) -> nn.Linear:
    """A linear layer that returns zeros until it is trained."""
    linear = nn.Linear(num_in, num_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
