"""Qwen-Image: a vision language model as the encoder; true guidance by two passes a step."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def vision_language_model(width: int = 32) -> Any:
    """A Qwen 2.5 VL of ``width``, two layers each for text and vision."""
    text = {
        "vocab_size": parts.VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1000000.0},
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    vision = {
        "depth": 2,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": 4,
        "out_hidden_size": width,
        "fullatt_block_indexes": [1],
    }
    special = dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 3)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _components() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(),
        "vae": diffusers.AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        "text_encoder": vision_language_model(),
        "tokenizer": parts.tokenizer(1024),
        "transformer": diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=64,
            out_channels=16,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
    }


QWEN_IMAGE = Family(
    name="Qwen-Image",
    pipeline_class=diffusers.QwenImagePipeline,
    make=_components,
    inputs={"negative_prompt": " ", "height": 32, "width": 32, "max_sequence_length": 512, "true_cfg_scale": 3.0},
    streamed={"transformer": 4},
    staged=("text_encoder", "vae"),
)
