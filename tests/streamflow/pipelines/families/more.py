"""Further families: other encoders, other arrangements of blocks."""

from __future__ import annotations

import warnings
from typing import Any

import diffusers

from tests.streamflow.pipelines.families import parts
from tests.streamflow.pipelines.families.family import Family


def _pixart() -> dict[str, Any]:
    return {
        "tokenizer": parts.tokenizer(),
        "text_encoder": parts.t5(),
        "vae": parts.image_vae(4, shift_factor=None),
        "transformer": diffusers.PixArtTransformer2DModel(
            sample_size=8,
            num_layers=4,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            use_additional_conditions=False,
        ),
        "scheduler": diffusers.DDIMScheduler(),
    }


def _z_image() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(),
        "vae": parts.image_vae(16),
        "text_encoder": parts.language_model("Qwen3"),
        "tokenizer": parts.chat_tokenizer(),
        "transformer": diffusers.ZImageTransformer2DModel(
            in_channels=16,
            dim=32,
            n_layers=3,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=32,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
    }


def _chroma() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the model uses what its own library has deprecated
        return _chroma_parts()


def _chroma_parts() -> dict[str, Any]:
    return {
        "scheduler": parts.flow_scheduler(),
        "vae": parts.image_vae(4),
        "text_encoder": parts.t5(),
        "tokenizer": parts.tokenizer(),
        "transformer": diffusers.ChromaTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
            approximator_hidden_dim=32,
            approximator_layers=1,
            approximator_num_channels=16,
        ),
    }


def _sana() -> dict[str, Any]:
    return {
        "tokenizer": parts.tokenizer(),
        "text_encoder": parts.language_model("Gemma2"),
        "vae": diffusers.AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        ),
        "transformer": diffusers.SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            num_attention_heads=2,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=32,
            sample_size=32,
        ),
        "scheduler": parts.flow_scheduler(shift=7.0),
    }


def _aura_flow() -> dict[str, Any]:
    return {
        "tokenizer": parts.tokenizer(),
        "text_encoder": parts.umt5(),
        "vae": parts.image_vae(4, shift_factor=None),
        "transformer": diffusers.AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            out_channels=4,
            pos_embed_max_size=64,
        ),
        "scheduler": parts.flow_scheduler(),
    }


def _lumina() -> dict[str, Any]:
    return {
        "transformer": diffusers.Lumina2Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=32,
            num_layers=3,
            num_refiner_layers=1,
            num_attention_heads=4,
            num_kv_heads=2,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(512, 16, 16),
            cap_feat_dim=32,
        ),
        "scheduler": parts.flow_scheduler(),
        "vae": parts.image_vae(4),
        "text_encoder": parts.language_model("Gemma2"),
        "tokenizer": parts.tokenizer(),
    }


def _sdxl() -> dict[str, Any]:
    return {
        "vae": parts.image_vae(4, shift_factor=None),
        "text_encoder": parts.clip_text(),
        "text_encoder_2": parts.clip_text(projection=True),
        "tokenizer": parts.tokenizer(77),
        "tokenizer_2": parts.tokenizer(77),
        "unet": diffusers.UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            sample_size=8,
            in_channels=4,
            out_channels=4,
            norm_num_groups=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=80,
            cross_attention_dim=64,
        ),
        "scheduler": diffusers.DDIMScheduler(),
        "add_watermarker": False,
    }


IMAGE = {"negative_prompt": "", "height": 32, "width": 32, "max_sequence_length": 16}

MORE = (
    Family(
        name="Stable Diffusion XL",
        pipeline_class=diffusers.StableDiffusionXLPipeline,
        make=_sdxl,
        inputs={"negative_prompt": "", "height": 32, "width": 32},
        streamed={"unet": 7},
        staged=("text_encoder", "text_encoder_2", "vae"),
    ),
    Family(
        name="PixArt Sigma",
        pipeline_class=diffusers.PixArtSigmaPipeline,
        make=_pixart,
        inputs={**IMAGE, "use_resolution_binning": False, "clean_caption": False},
        streamed={"transformer": 4},
        staged=("text_encoder", "vae"),
    ),
    Family(
        name="Z-Image",
        pipeline_class=diffusers.ZImagePipeline,
        make=_z_image,
        inputs={"height": 32, "width": 32, "max_sequence_length": 16},
        streamed={"transformer": 5},
        staged=("text_encoder", "vae"),
    ),
    Family(
        name="Chroma",
        pipeline_class=diffusers.ChromaPipeline,
        make=_chroma,
        inputs=IMAGE,
        streamed={"transformer": 4},
        staged=("text_encoder", "vae"),
    ),
    Family(
        name="Sana",
        pipeline_class=diffusers.SanaPipeline,
        make=_sana,
        inputs={
            **IMAGE,
            "use_resolution_binning": False,
            "clean_caption": False,
            "complex_human_instruction": None,
        },
        streamed={"transformer": 3},
        staged=("text_encoder", "vae"),
    ),
    Family(
        name="AuraFlow",
        pipeline_class=diffusers.AuraFlowPipeline,
        make=_aura_flow,
        inputs=IMAGE,
        streamed={"transformer": 4},
        staged=("text_encoder", "vae"),
    ),
    Family(
        name="Lumina 2",
        pipeline_class=diffusers.Lumina2Pipeline,
        make=_lumina,
        inputs={**IMAGE, "max_sequence_length": 256},
        streamed={"transformer": 5},
        staged=("text_encoder", "vae"),
    ),
)
