"""HunyuanVideo 1.5: an encoder for quoted words, which the pipeline's order leaves out; a guider with state."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.guiders import ClassifierFreeGuidance

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family
from tests.streamflow.pipelines.families.qwen_image import vision_language_model


def _vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=8,
    )


def _components() -> dict[str, Any]:
    return {
        "text_encoder": vision_language_model().model.language_model,
        "tokenizer": parts.chat_tokenizer(),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=4,
            num_refiner_layers=1,
            text_embed_dim=32,
            text_embed_2_dim=32,
            image_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
            target_size=16,
            task_type="t2v",
        ),
        "vae": _vae(),
        "scheduler": parts.flow_scheduler(shift=7.0),
        "text_encoder_2": parts.t5(),
        "tokenizer_2": parts.tokenizer(),
        "guider": ClassifierFreeGuidance(guidance_scale=3.0),
    }


HUNYUAN_VIDEO_15 = Family(
    name="HunyuanVideo 1.5",
    pipeline_class=diffusers.HunyuanVideo15Pipeline,
    make=_components,
    inputs={"prompt": 'a red fox, "hello"', "negative_prompt": "", "height": 16, "width": 16, "num_frames": 5},
    streamed={"transformer": 4},
    staged=("text_encoder", "vae", "text_encoder_2"),
    output="frames",
    settings={
        "system_message": "describe: ",
        "prompt_template_encode_start_idx": 10,
        "tokenizer_max_length": 32,
        "tokenizer_2_max_length": 16,
        "vision_num_semantic_tokens": 4,
    },
)
