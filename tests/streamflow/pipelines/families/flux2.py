"""Flux 2 (klein): inner layers of a language model as the prompt; the pipeline reads statistics from the VAE."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _vae() -> Any:
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )


def _components() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(),
        "vae": _vae(),
        "text_encoder": parts.language_model("Qwen3"),
        "tokenizer": parts.chat_tokenizer(),
        "transformer": diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=64,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
    }


FLUX2 = Family(
    name="Flux 2",
    pipeline_class=diffusers.Flux2KleinPipeline,
    make=_components,
    inputs={"height": 32, "width": 32, "max_sequence_length": 16, "text_encoder_out_layers": (1, 2)},
    streamed={"transformer": 5},
    staged=("text_encoder", "vae"),
)
