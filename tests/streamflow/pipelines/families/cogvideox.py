"""CogVideoX: a scheduler that predicts velocities, guidance by a batch of two."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _vae() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )


def _components() -> dict[str, Any]:
    return {
        "tokenizer": parts.tokenizer(),
        "text_encoder": parts.t5(),
        "vae": _vae(),
        "transformer": diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=2,
            text_embed_dim=32,
            num_layers=4,
            sample_width=2,
            sample_height=2,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=16,
        ),
        "scheduler": diffusers.CogVideoXDDIMScheduler(),
    }


COGVIDEOX = Family(
    name="CogVideoX",
    pipeline_class=diffusers.CogVideoXPipeline,
    make=_components,
    inputs={"negative_prompt": "", "height": 16, "width": 16, "num_frames": 8, "max_sequence_length": 16},
    streamed={"transformer": 4},
    staged=("text_encoder", "vae"),
    output="frames",
)
