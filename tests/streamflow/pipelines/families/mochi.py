"""Mochi: a bare parameter beside the blocks, a last block that is smaller than the others."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _vae() -> Any:
    return diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )


def _components() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(num_train_timesteps=1000, invert_sigmas=True),
        "vae": _vae(),
        "text_encoder": parts.t5(),
        "tokenizer": parts.tokenizer(),
        "transformer": diffusers.MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=4,
            pooled_projection_dim=16,
            text_embed_dim=32,
            time_embed_dim=8,
        ),
    }


MOCHI = Family(
    name="Mochi",
    pipeline_class=diffusers.MochiPipeline,
    make=_components,
    inputs={"negative_prompt": "", "height": 16, "width": 16, "num_frames": 7, "max_sequence_length": 16},
    streamed={"transformer": 4},
    staged=("text_encoder", "vae"),
    output="frames",
    warns="In CPU autocast",
)
