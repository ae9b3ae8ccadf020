"""Components that several families have: tokenizers, text encoders, the VAE of images, schedulers."""

from __future__ import annotations

from typing import Any

import diffusers
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

#: 256 bytes and the special tokens.
VOCABULARY = 260
_SPECIAL = ("<pad>", "</s>", "<s>", "<unk>")


def tokenizer(max_length: int = 16) -> Any:
    """Every byte a token; ends with one for the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {token: number for number, token in enumerate((*_SPECIAL, *letters))}
    made = tokenizers.Tokenizer(models.BPE(vocab=numbers, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        model_max_length=max_length,
        padding_side="right",
    )


def chat_tokenizer(max_length: int = 16) -> Any:
    """The same, with a template that leaves of a chat what is said in it."""
    made = tokenizer(max_length)
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def clip_text(projection: bool = False, width: int = 32) -> Any:
    """A CLIP text encoder of ``width`` with two layers."""
    kind = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    config = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        projection_dim=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        hidden_act="gelu",
    )
    return kind(config)


def t5(width: int = 32) -> Any:
    """A T5 encoder of ``width`` with two layers, whose embedding has two names."""
    return transformers.T5EncoderModel(_t5_config(transformers.T5Config, width))


def umt5(width: int = 32) -> Any:
    """A UMT5 encoder of ``width`` with two layers: each has its own relative positions."""
    return transformers.UMT5EncoderModel(_t5_config(transformers.UMT5Config, width))


def _t5_config(kind: Any, width: int) -> Any:
    return kind(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )


def language_model(kind: str, width: int = 32, **more: Any) -> Any:
    """A decoder-only language model of the family ``kind`` (its class's name without ``Model``), two layers."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        **more,
    )
    return getattr(transformers, f"{kind}Model")(config)


def image_vae(latent_channels: int, **more: Any) -> Any:
    """The VAE of images: 8 x 8 pixels a latent, as the large one (4 levels)."""
    config = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": latent_channels,
        "norm_num_groups": 4,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.0609,
        "scaling_factor": 1.5035,
        **more,
    }
    return diffusers.AutoencoderKL(**config)


def flow_scheduler(**more: Any) -> Any:
    """The scheduler of flow matching."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**more)
