"""HunyuanVideo: a language model and CLIP, double and single blocks, a block that refines the prompt."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def hunyuan_vae() -> Any:
    """The VAE of videos that other families have, too."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )


def _components() -> dict[str, Any]:
    return {
        "text_encoder": parts.language_model("Llama"),
        "tokenizer": parts.tokenizer(1024),
        "transformer": diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=2,
            num_single_layers=3,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=32,
            pooled_projection_dim=32,
            rope_axes_dim=(2, 4, 4),
        ),
        "vae": hunyuan_vae(),
        "scheduler": parts.flow_scheduler(shift=7.0),
        "text_encoder_2": parts.clip_text(),
        "tokenizer_2": parts.tokenizer(77),
    }


HUNYUAN_VIDEO = Family(
    name="HunyuanVideo",
    pipeline_class=diffusers.HunyuanVideoPipeline,
    make=_components,
    inputs={
        "prompt_template": {"template": "describe: {}", "crop_start": 10},
        "height": 16,
        "width": 16,
        "num_frames": 5,
        "max_sequence_length": 16,
    },
    streamed={"transformer": 6},
    staged=("text_encoder", "text_encoder_2", "vae"),
    output="frames",
)
