"""Streams a Flux transformer from the directory that diffusers saved it in, through a window of two blocks.

    python examples/stream_flux_transformer.py
    python examples/stream_flux_transformer.py FLUX.1-dev/transformer --device cuda --no-compare

Without a directory a small transformer with random weights is made and saved first. With ``--compare`` the same steps
run through the resident model too, which has to fit on the device then; the exit status is 1 if one byte differs.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import click
import torch
from diffusers import FluxTransformer2DModel

import streamflow
from streamflow.diffusers_models import diffusers_builder

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SMALL = {
    "in_channels": 16,
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (4, 6, 6),
    "guidance_embeds": True,
}


def save_small_transformer(directory: Path, dtype: torch.dtype) -> Path:
    """Where a transformer of a few megabytes was saved, with random weights of ``dtype``."""
    torch.manual_seed(0)
    FluxTransformer2DModel(**SMALL).save_pretrained(directory / "float32")
    # files are streamed as they are: to stream other dtypes than they have, load and save them once
    converted = FluxTransformer2DModel.from_pretrained(directory / "float32", torch_dtype=dtype)
    converted.save_pretrained(directory / "converted")
    return directory / "converted"


def denoise(model: FluxTransformer2DModel, num_steps: int, size: int, device: torch.device) -> torch.Tensor:
    """What a pipeline does with the transformer: one forward per step. The text and the noise are random here."""
    config, dtype = model.config, model.dtype
    generator = torch.Generator().manual_seed(1)
    random = functools.partial(torch.randn, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(float(size)), torch.arange(float(size)), indexing="ij")
    image_ids = torch.stack([torch.zeros(size * size), rows.flatten(), columns.flatten()], dim=1).to(device)
    latents = random(1, size * size, config.in_channels).to(device, dtype)
    text = random(1, 32, config.joint_attention_dim).to(device, dtype)
    pooled = random(1, config.pooled_projection_dim).to(device, dtype)
    guidance = torch.full((1,), 3.5, device=device) if config.guidance_embeds else None
    sigmas = torch.linspace(1, 0, num_steps + 1).to(device)
    for now, later in itertools.pairwise(sigmas):
        (velocity,) = model(
            hidden_states=latents,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=now.reshape(1).to(dtype),
            img_ids=image_ids,
            txt_ids=torch.zeros(32, 3, device=device),
            guidance=guidance,
            return_dict=False,
        )
        latents = latents + (later - now).to(dtype) * velocity
    return latents.cpu()


def load_resident(directory: Path, dtype: torch.dtype, device: torch.device) -> FluxTransformer2DModel:
    """The whole model on the device, its weights at multiples of 256 bytes, as they lie in a slot.

    On a CPU the last bits of a result may depend on where a weight begins.
    """
    model = FluxTransformer2DModel.from_pretrained(directory, torch_dtype=dtype)
    for parameter in model.parameters():
        memory = torch.empty(parameter.nbytes + 256, dtype=torch.uint8, device=device)
        begin = -memory.data_ptr() % 256
        aligned = memory[begin : begin + parameter.nbytes].view(dtype).view(parameter.shape)
        parameter.data = aligned.copy_(parameter.data)
    return model


async def stream(
    directory: Path, dtype: torch.dtype, config: streamflow.OffloadConfig, work: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, streamflow.OffloadStatistics]:
    """The result of ``work(model)`` with the streamed model, and what it took."""
    build = diffusers_builder(directory, dtype)
    async with streamflow.open_streamed(build, directory, config) as (offload, model):
        with torch.no_grad():
            latents = await offload.run(work, model)
        return latents, offload.statistics()


def report(statistics: streamflow.OffloadStatistics) -> None:
    """Say what was streamed, from where and how."""
    choice, engine = statistics.choice, statistics.engine
    click.echo(f"source: {choice.source} ({choice.source_reason})")
    click.echo(f"transfer: {choice.transfer} ({choice.transfer_reason})")
    click.echo(f"blocks: {statistics.num_blocks}, {statistics.num_resident_blocks} of them resident")
    click.echo(f"weights: {statistics.model_bytes:,} bytes, on the device at most {engine.device_peak_bytes:,}")
    click.echo(f"streamed: {engine.streamed_bytes:,} bytes in {engine.num_walks} walks")


async def run(directory: Path, dtype: torch.dtype, steps: int, window: int, device: str | None, compare: bool) -> int:
    """The exit status: 0 if something was streamed, and the same as the resident model computes if that is compared."""
    config = streamflow.OffloadConfig(window_blocks=window, device=device)
    work = functools.partial(denoise, num_steps=steps, size=16, device=config.torch_device())
    latents, statistics = await stream(directory, dtype, config, work)
    report(statistics)
    if not compare:
        return 0 if statistics.engine.streamed_bytes else 1

    @torch.no_grad()
    def run_resident() -> torch.Tensor:
        return work(load_resident(directory, dtype, config.torch_device()))

    resident = await anyio.to_thread.run_sync(run_resident)  # in a thread, like the streamed forward
    equal = torch.equal(latents.view(torch.uint8), resident.view(torch.uint8))
    click.echo(f"equal to the resident model: {equal}")
    return 0 if equal and statistics.engine.streamed_bytes else 1


@click.command(help=__doc__.partition("\n\n")[0])
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True)
@click.option("--window", type=click.IntRange(1), default=2, show_default=True, help="Blocks on the device at a time.")
@click.option("--device", default=None, help="Where to compute; a CUDA device if there is one.")
@click.option("--compare/--no-compare", default=True, help="Run the resident model too, and compare every byte.")
def main(directory: Path | None, dtype: str, steps: int, window: int, device: str | None, compare: bool) -> None:
    """Make a directory if there is none, and run."""
    with tempfile.TemporaryDirectory() as scratch:
        if directory is None:
            directory = save_small_transformer(Path(scratch), DTYPES[dtype])
        sys.exit(asyncio.run(run(directory, DTYPES[dtype], steps, window, device, compare)))


if __name__ == "__main__":
    main()
