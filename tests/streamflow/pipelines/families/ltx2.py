"""LTX 2: video and sound, with connectors between encoder and transformer, a VAE for each, and a vocoder."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family

#: What a piece of sound takes in the transformer: channels of its latents times their frequencies.
_SOUND = 16


def _vae() -> Any:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
    )


def _audio_vae() -> Any:
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=_SOUND,
        ch_mult=(1,),
        num_res_blocks=1,
        latent_channels=4,
        mel_bins=16,
    )


def _connectors() -> Any:
    return LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
    )


def _vocoder() -> Any:
    return LTX2Vocoder(
        in_channels=32,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1]],
    )


def _transformer() -> Any:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=_SOUND,
        audio_out_channels=_SOUND,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=4,
        caption_channels=32,
    )


def _components() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05),
        "vae": _vae(),
        "audio_vae": _audio_vae(),
        "text_encoder": parts.language_model("Gemma2"),
        "tokenizer": parts.tokenizer(),
        "connectors": _connectors(),
        "transformer": _transformer(),
        "vocoder": _vocoder(),
    }


LTX2 = Family(
    name="LTX 2",
    pipeline_class=diffusers.LTX2Pipeline,
    make=_components,
    inputs={
        "negative_prompt": "",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "max_sequence_length": 16,
        "spatio_temporal_guidance_blocks": [1],
        "modality_scale": 1.0,
        "audio_modality_scale": 1.0,
    },
    streamed={"transformer": 4},
    staged=("text_encoder", "connectors", "vae", "audio_vae", "vocoder"),
    output="frames",
    more_outputs=("audio",),
)
