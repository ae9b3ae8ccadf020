"""LTX: a pipeline that reads the VAE's statistics itself."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _vae() -> Any:
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )


def _components() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05),
        "vae": _vae(),
        "text_encoder": parts.t5(),
        "tokenizer": parts.tokenizer(),
        "transformer": diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=4,
            caption_channels=32,
        ),
    }


LTX = Family(
    name="LTX",
    pipeline_class=diffusers.LTXPipeline,
    make=_components,
    inputs={"negative_prompt": "", "height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 16},
    streamed={"transformer": 4},
    staged=("text_encoder", "vae"),
    output="frames",
)
