"""Small diffusers transformers with everything that the large ones have, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import diffusers
import torch
from torch import nn

from tests.streamflow.models import Call, seeded

NUM_WALKS = 3

#: Double blocks, then single blocks; a guidance embedding as the distilled models have it.
FLUX = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 3,
    "num_single_layers": 5,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 40,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 112,
    "num_layers": 7,
    "rope_max_seq_len": 32,
}


def _random(generator: torch.Generator, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def flux_call(generator: torch.Generator, dtype: torch.dtype) -> Call:
    """A picture of 4 x 6 patches and 5 tokens of text."""
    random = _random(generator, dtype)
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
    image_ids = torch.stack([torch.zeros(24), rows.flatten(), columns.flatten()], dim=1)
    timestep, guidance = torch.rand(2, 1, generator=generator).to(dtype)
    return (random(1, 24, 16), random(1, 5, 24), random(1, 40), timestep, image_ids, torch.zeros(5, 3), guidance)


def wan_call(generator: torch.Generator, dtype: torch.dtype) -> Call:
    """A video of 3 x 4 x 6 latents and 5 tokens of text."""
    random = _random(generator, dtype)
    timestep = torch.randint(1000, (1,), generator=generator)
    return (random(1, 4, 3, 4, 6), timestep, random(1, 5, 32))


@attrs.frozen(eq=False)
class DiffusersModel:
    """A model class of diffusers in a small configuration. ``stacks``: its block lists, in execution order."""

    name: str
    model_class: Any
    config: dict[str, Any]
    stacks: dict[str, int]
    make_call: Callable[[torch.Generator, torch.dtype], Call]

    def __str__(self) -> str:
        return self.name

    @property
    def block_paths(self) -> list[str]:
        return [f"{stack}.{index}" for stack, count in self.stacks.items() for index in range(count)]

    def build(self) -> nn.Module:
        """The model with the same random weights every time."""
        return seeded(lambda: self.model_class(**self.config))

    def calls(self, dtype: torch.dtype) -> tuple[Call, ...]:
        """The arguments of the walks, different ones each."""
        generator = torch.Generator().manual_seed(2)
        return tuple(self.make_call(generator, dtype) for _ in range(NUM_WALKS))

    def load(self, directory: Path, dtype: torch.dtype | None) -> nn.Module:
        """What ``from_pretrained`` gives, ready for inference."""
        model: nn.Module = self.model_class.from_pretrained(directory, torch_dtype=dtype)
        return model.requires_grad_(False)


FLUX_MODEL = DiffusersModel(
    "Flux",
    diffusers.FluxTransformer2DModel,
    FLUX,
    {"transformer_blocks": 3, "single_transformer_blocks": 5},
    flux_call,
)
WAN_MODEL = DiffusersModel("Wan", diffusers.WanTransformer3DModel, WAN, {"blocks": 7}, wan_call)
MODELS = (FLUX_MODEL, WAN_MODEL)


@attrs.frozen
class Variant:
    """A model as it is saved: with weights of one dtype (but for those kept in float32), in one file or in several."""

    model: DiffusersModel
    dtype: torch.dtype
    sharded: bool

    def __str__(self) -> str:
        return f"{self.model} {self.dtype_name} {'shards' if self.sharded else 'one file'}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.model.calls(self.dtype)

    def save(self, directory: Path) -> None:
        """Save as users do: what ``from_pretrained`` made of the float32 weights, in shards of a fifth if sharded."""
        made: Any = self.model.build()
        made.save_pretrained(directory / "float32")
        model: Any = self.model.load(directory / "float32", self.dtype)
        nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        model.save_pretrained(directory / "saved", max_shard_size=nbytes // 5 if self.sharded else nbytes)


DTYPES = (torch.float32, torch.bfloat16)
VARIANTS = tuple(Variant(model, dtype, sharded) for model in MODELS for dtype in DTYPES for sharded in (False, True))
