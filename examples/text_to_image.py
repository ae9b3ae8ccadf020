"""Makes a picture from a text with a whole pipeline that streams: encoders, transformer and VAE under one budget.

    python examples/text_to_image.py
    python examples/text_to_image.py FLUX.1-dev --device cuda --prompt "a red fox" --steps 30 --size 1024 --no-compare

Without a directory a small pipeline with random weights is made first; its pictures show nothing. With ``--compare``
the resident pipeline runs, too; the exit status is 1 if one byte differs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import click
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

import streamflow

#: What the small text encoders have in common: a token for each byte, one for the end, one for padding.
TEXT = {"vocab_size": 258, "pad_token_id": 0, "eos_token_id": 1}
CLIP = {"bos_token_id": 1, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def small_pipeline() -> FluxPipeline:
    """A pipeline of a megabyte, with random weights."""
    torch.manual_seed(0)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            norm_num_groups=4,
            shift_factor=0.0,
            scaling_factor=1.0,
        ),
        text_encoder=CLIPTextModel(CLIPTextConfig(**TEXT, **CLIP)),
        tokenizer=byte_tokenizer(77),
        text_encoder_2=T5EncoderModel(T5Config(**TEXT, **T5)),
        tokenizer_2=byte_tokenizer(64),
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=3,
            num_single_layers=6,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
    )


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer that knows bytes and nothing else."""
    names = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=max_length
    )


def align(model: nn.Module) -> None:
    """Let every weight begin at a multiple of 256 bytes, as in a slot: a CPU's last bits may depend on it."""
    for parameter in model.parameters():
        memory = torch.empty(parameter.nbytes + 256, dtype=torch.uint8)
        begin = -memory.data_ptr() % 256
        aligned = memory[begin : begin + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = aligned.copy_(parameter.data)


async def stream(
    pipeline: Any, config: streamflow.OffloadConfig, request: dict[str, Any]
) -> tuple[torch.Tensor, streamflow.OffloadStatistics]:
    """The picture, and what it took."""
    async with streamflow.open_offload(pipeline, config, warmup=True) as offload:
        result = await offload.run(pipeline, **request, generator=torch.Generator().manual_seed(1))
        return result.images, offload.statistics()


def report(statistics: streamflow.OffloadStatistics) -> None:
    """Say what each component did, and what it took."""
    for component in statistics.components:
        click.echo(f"{component.name}: {component.behaviour}, {component.model_bytes:,} bytes")
    engine = statistics.engine
    click.echo(f"weights: {statistics.model_bytes:,} bytes, on the device at most {engine.device_peak_bytes:,}")
    click.echo(f"streamed: {engine.streamed_bytes:,} bytes in {engine.num_walks} walks")


def save(images: torch.Tensor, path: Path) -> None:
    """Write the first picture."""
    pixels = (images[0].float().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), bytes(pixels.flatten().tolist())).save(path)
    click.echo(f"picture: {path}")


@click.command(help=__doc__.partition("\n\n")[0])
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompt", default="a red fox", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True)
@click.option("--size", type=click.IntRange(16), default=64, show_default=True, help="Pixels of an edge.")
@click.option("--budget", type=click.IntRange(1), default=None, help="Bytes of weights on the device, at most.")
@click.option("--device", default=None, help="Where to compute; a CUDA device if there is one.")
@click.option("--out", default="picture.png", show_default=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--compare/--no-compare", default=True, help="Run the resident pipeline, too, and compare every byte.")
def main(
    directory: Path | None,
    prompt: str,
    steps: int,
    size: int,
    budget: int | None,
    device: str | None,
    out: Path,
    compare: bool,
) -> None:
    """Make a pipeline if none is given, and run."""
    pipeline = DiffusionPipeline.from_pretrained(directory, dtype="auto") if directory else small_pipeline()
    pipeline.set_progress_bar_config(disable=not directory)
    config = streamflow.OffloadConfig(device=device, device_budget_bytes=budget)
    request = {"prompt": prompt, "num_inference_steps": steps, "height": size, "width": size, "output_type": "pt"}
    sys.exit(asyncio.run(run(pipeline, config, request, out, compare)))


async def run(
    pipeline: Any, config: streamflow.OffloadConfig, request: dict[str, Any], out: Path, compare: bool
) -> int:
    """The exit status: 0 if something was streamed, and the same as the resident pipeline makes if that is compared."""
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.eval().requires_grad_(False)
            align(component)
    images, statistics = await stream(pipeline, config, request)
    report(statistics)
    save(images.cpu(), out)
    if not compare:
        return 0 if statistics.engine.streamed_bytes else 1

    def run_resident() -> torch.Tensor:
        pipeline.to(config.torch_device())
        resident: torch.Tensor = pipeline(**request, generator=torch.Generator().manual_seed(1)).images
        return resident

    resident = await anyio.to_thread.run_sync(run_resident)  # in a thread, like the streamed request
    equal = torch.equal(images.view(torch.uint8), resident.view(torch.uint8))
    click.echo(f"equal to the resident pipeline: {equal}")
    return 0 if equal and statistics.engine.streamed_bytes else 1


if __name__ == "__main__":
    main()
