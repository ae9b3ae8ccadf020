"""Wan 2.2: one expert for high noise, one for low; guidance by two passes a step."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _expert() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=4,
        rope_max_seq_len=32,
        cross_attn_norm=True,
    )


def _components() -> dict[str, Any]:
    return {
        "tokenizer": parts.tokenizer(),
        "text_encoder": parts.umt5(),
        "vae": diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        "scheduler": diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        "transformer": _expert(),
        "transformer_2": _expert(),
        "boundary_ratio": 0.875,
    }


WAN = Family(
    name="Wan 2.2",
    pipeline_class=diffusers.WanPipeline,
    make=_components,
    inputs={
        "negative_prompt": "",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "max_sequence_length": 16,
        "guidance_scale": 4.0,
    },
    streamed={"transformer": 4, "transformer_2": 4},
    staged=("text_encoder", "vae"),
    output="frames",
)
