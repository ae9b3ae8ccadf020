"""Stable Diffusion 3: three encoders, guidance by a batch of two."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _components() -> dict[str, Any]:
    return {
        "transformer": diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        "scheduler": parts.flow_scheduler(),
        "vae": parts.image_vae(4),
        "text_encoder": parts.clip_text(projection=True),
        "tokenizer": parts.tokenizer(77),
        "text_encoder_2": parts.clip_text(projection=True),
        "tokenizer_2": parts.tokenizer(77),
        "text_encoder_3": parts.t5(64),
        "tokenizer_3": parts.tokenizer(),
    }


SD3 = Family(
    name="Stable Diffusion 3",
    pipeline_class=diffusers.StableDiffusion3Pipeline,
    make=_components,
    inputs={"height": 32, "width": 32, "max_sequence_length": 16},
    streamed={"transformer": 4},
    staged=("text_encoder", "text_encoder_2", "text_encoder_3", "vae"),
)
