"""Kandinsky 5: blocks for the text before those for the video, found by looking; it declares no classes of blocks."""

from __future__ import annotations

from typing import Any

import diffusers
from torch import nn

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family
from tests.streamflow.pipelines.families.hunyuan_video import hunyuan_vae
from tests.streamflow.pipelines.families.qwen_image import vision_language_model


def _transformer() -> Any:
    made = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=32,
        in_text_dim2=32,
        time_dim=32,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=2,
        num_visual_blocks=3,
        axes_dims=(4, 6, 6),
    )
    for name, parameter in made.named_parameters():
        if "modulation.out_layer" in name:  # made as zeros, which shut every block off
            nn.init.normal_(parameter, std=0.1)
    return made


def _components() -> dict[str, Any]:
    return {
        "transformer": _transformer(),
        "vae": hunyuan_vae(),
        "text_encoder": vision_language_model(),
        "tokenizer": parts.tokenizer(1024),
        "text_encoder_2": parts.clip_text(),
        "tokenizer_2": parts.tokenizer(77),
        "scheduler": parts.flow_scheduler(shift=5.0),
    }


KANDINSKY5 = Family(
    name="Kandinsky 5",
    pipeline_class=diffusers.Kandinsky5T2VPipeline,
    make=_components,
    inputs={"negative_prompt": "", "height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16},
    streamed={"transformer": 5},
    staged=("text_encoder", "text_encoder_2", "vae"),
    output="frames",
    settings={"prompt_template": "describe: {}", "prompt_template_encode_start_idx": 10},
)
