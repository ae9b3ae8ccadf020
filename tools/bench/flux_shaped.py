"""A transformer with the shape of FLUX.1: the same blocks, sizes and operations, with random weights.

Sizes follow the published configuration: width 3072, 24 heads, 19 double and 38 single blocks, 11.9 billion weights.
"""

from __future__ import annotations

import attrs
import torch
from torch import nn
from torch.nn import functional


@attrs.frozen
class FluxShape:
    """Sizes of a FLUX.1-shaped transformer."""

    width: int = 3072
    num_heads: int = 24
    num_double: int = 19
    num_single: int = 38
    text_width: int = 4096
    in_channels: int = 64

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


#: Small enough for a laptop's CPU.
SMALL = FluxShape(width=256, num_heads=4, num_double=4, num_single=8, text_width=128, in_channels=16)


def _split_heads(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(2)
    return q, k, v


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    cos, sin = rotation[..., 0], rotation[..., 1]
    turned = (pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 0] * sin + pairs[..., 1] * cos)
    return torch.stack(turned, -1).flatten(-2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    q, k = _rotate(q, rotation), _rotate(k, rotation)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class _Stream(nn.Module):
    """Image or text side of a double block."""

    def __init__(self, shape: FluxShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.modulation = nn.Linear(shape.width, 6 * shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.norm_q = nn.RMSNorm(shape.head_width, eps=1e-6)
        self.norm_k = nn.RMSNorm(shape.head_width, eps=1e-6)
        self.projection = nn.Linear(shape.width, shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU("tanh"), nn.Linear(4 * shape.width, shape.width)
        )

    def before(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = _split_heads(self.qkv(_modulate(x, shift, scale)), self.num_heads)
        return self.norm_q(q), self.norm_k(k), v

    def after(self, x: torch.Tensor, attended: torch.Tensor, rest: tuple[torch.Tensor, ...]) -> torch.Tensor:
        gate, shift, scale, mlp_gate = rest
        x = x + gate * self.projection(attended)
        result: torch.Tensor = x + mlp_gate * self.mlp(_modulate(x, shift, scale))
        return result


class DoubleBlock(nn.Module):
    """Image and text tokens with weights of their own, attending together."""

    def __init__(self, shape: FluxShape) -> None:
        super().__init__()
        self.image = _Stream(shape)
        self.text = _Stream(shape)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, vector: torch.Tensor, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mods = [stream.modulation(functional.silu(vector))[:, None].chunk(6, -1) for stream in (self.text, self.image)]
        parts = [
            stream.before(x, *mod[:2])
            for stream, x, mod in zip((self.text, self.image), (text, image), mods, strict=True)
        ]
        q, k, v = (torch.cat(both, 1) for both in zip(*parts, strict=True))
        attended = _attend(q, k, v, rotation)
        num_text = text.shape[1]
        text = self.text.after(text, attended[:, :num_text], mods[0][2:])
        return self.image.after(image, attended[:, num_text:], mods[1][2:]), text


class SingleBlock(nn.Module):
    """All tokens together, attention and MLP side by side."""

    def __init__(self, shape: FluxShape) -> None:
        super().__init__()
        self.num_heads, self.width = shape.num_heads, shape.width
        self.modulation = nn.Linear(shape.width, 3 * shape.width)
        self.first = nn.Linear(shape.width, 7 * shape.width)
        self.second = nn.Linear(5 * shape.width, shape.width)
        self.norm_q = nn.RMSNorm(shape.head_width, eps=1e-6)
        self.norm_k = nn.RMSNorm(shape.head_width, eps=1e-6)

    def forward(self, x: torch.Tensor, vector: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(functional.silu(vector))[:, None].chunk(3, -1)
        qkv, mlp = self.first(_modulate(x, shift, scale)).split([3 * self.width, 4 * self.width], -1)
        q, k, v = _split_heads(qkv, self.num_heads)
        attended = _attend(self.norm_q(q), self.norm_k(k), v, rotation)
        both = torch.cat([attended, functional.gelu(mlp, approximate="tanh")], -1)
        result: torch.Tensor = x + gate * self.second(both)
        return result


class FluxShaped(nn.Module):
    """The transformer: latents ``[B, tokens, in_channels]`` and text ``[B, tokens, text_width]`` to a velocity."""

    def __init__(self, shape: FluxShape) -> None:
        super().__init__()
        self.shape = shape
        self.image_in = nn.Linear(shape.in_channels, shape.width)
        self.text_in = nn.Linear(shape.text_width, shape.width)
        self.time_in = nn.Sequential(nn.Linear(256, shape.width), nn.SiLU(), nn.Linear(shape.width, shape.width))
        self.double_blocks = nn.ModuleList(DoubleBlock(shape) for _ in range(shape.num_double))
        self.single_blocks = nn.ModuleList(SingleBlock(shape) for _ in range(shape.num_single))
        self.out = nn.Linear(shape.width, shape.in_channels)

    def forward(self, image: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        vector = self.time_in(_time_embedding(time).to(image.dtype))
        image, text = self.image_in(image), self.text_in(text)
        rotation = _rotation(text.shape[1] + image.shape[1], self.shape.head_width, image)
        for double in self.double_blocks:
            image, text = double(image, text, vector, rotation)
        x = torch.cat([text, image], 1)
        for single in self.single_blocks:
            x = single(x, vector, rotation)
        x = x[:, text.shape[1] :]
        result: torch.Tensor = self.out(functional.layer_norm(x, x.shape[-1:], eps=1e-6))
        return result


def _time_embedding(time: torch.Tensor) -> torch.Tensor:
    frequencies = torch.exp(-torch.arange(128, device=time.device) / 128 * 9.21)
    angles = 1000 * time[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def _rotation(num_tokens: int, head_width: int, like: torch.Tensor) -> torch.Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, head_width, 2, device=like.device) / head_width)
    angles = torch.arange(num_tokens, device=like.device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], -1).to(like.dtype)[:, None]


def random_model(shape: FluxShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> FluxShaped:
    """The model with seeded random weights of a size that keeps activations finite, on ``device``, in eval mode."""
    with torch.device("meta"):
        model = FluxShaped(shape).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or parameter.ndim == 1:
            parameter.fill_(1.0 if "norm" in name else 0.0)
        else:
            parameter.normal_(0.0, 0.5 * parameter.shape[-1] ** -0.5, generator=generator)
    return model


def random_models(shape: FluxShape, dtype: torch.dtype, device: torch.device) -> tuple[FluxShaped, FluxShaped]:
    """The model on ``device``, and one of the same weights on the host."""
    resident = random_model(shape, dtype, device)
    with torch.device("meta"):
        model = FluxShaped(shape).to(dtype)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    for there, here in zip(resident.parameters(), model.parameters(), strict=True):
        here.copy_(there)
    return resident, model


def random_inputs(
    shape: FluxShape, image_px: int, num_text: int, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, text and time for one picture of ``image_px`` squared: one token for each 16 x 16 pixels."""
    generator = torch.Generator(device).manual_seed(seed)
    num_image = (image_px // 16) ** 2
    image = torch.randn(1, num_image, shape.in_channels, generator=generator, device=device, dtype=dtype)
    text = torch.randn(1, num_text, shape.text_width, generator=generator, device=device, dtype=dtype)
    return image, text, torch.tensor([0.5], device=device)
