"""Flux: two encoders, double and single blocks."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _components() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(),
        "vae": parts.image_vae(4),
        "text_encoder": parts.clip_text(),
        "tokenizer": parts.tokenizer(77),
        "text_encoder_2": parts.t5(),
        "tokenizer_2": parts.tokenizer(),
        "transformer": diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
    }


FLUX = Family(
    name="Flux",
    pipeline_class=diffusers.FluxPipeline,
    make=_components,
    inputs={"height": 32, "width": 32, "max_sequence_length": 16},
    streamed={"transformer": 5},
    staged=("text_encoder", "text_encoder_2", "vae"),
)
