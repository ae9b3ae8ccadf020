"""HiDream: four encoders, experts in the blocks, and blocks that lie in wrappers that its class does not speak of."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _components() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(),
        "vae": parts.image_vae(4),
        "text_encoder": parts.clip_text(projection=True),
        "tokenizer": parts.tokenizer(77),
        "text_encoder_2": parts.clip_text(projection=True),
        "tokenizer_2": parts.tokenizer(77),
        "text_encoder_3": parts.t5(),
        "tokenizer_3": parts.tokenizer(),
        "text_encoder_4": parts.language_model("Llama", attn_implementation="eager"),
        "tokenizer_4": parts.tokenizer(),
        "transformer": diffusers.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=[32, 32],
            text_emb_dim=64,
            num_routed_experts=4,
            num_activated_experts=2,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(8, 8),
            llama_layers=[0, 1, 0, 1],
        ),
    }


HIDREAM = Family(
    name="HiDream",
    pipeline_class=diffusers.HiDreamImagePipeline,
    make=_components,
    inputs={"negative_prompt": "", "height": 32, "width": 32, "max_sequence_length": 16},
    streamed={"transformer": 4},
    staged=("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "vae"),
    settings={"default_sample_size": 4},
)
