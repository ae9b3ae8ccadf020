"""A diffusers pipeline around a streamed transformer makes the latents that it makes around the resident one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import streamflow
from streamflow.diffusers_models import diffusers_builder
from tests.streamflow.kit import NUM_REQUESTS, aligned_reference, check_statistics, in_worker, sha256_of
from tests.streamflow.real_models.models import FLUX_MODEL, WAN_MODEL, Variant

pytestmark = pytest.mark.anyio

Saved = Callable[[Variant], Path]
NUM_STEPS = 3


def flux_pipeline(transformer: nn.Module) -> Callable[[], torch.Tensor]:
    """Its text encoders and its VAE are left out: what they would give is given, and latents are what it returns."""
    pipeline: Any = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    ).to("cpu")
    pipeline.set_progress_bar_config(disable=True)

    def generate() -> torch.Tensor:
        random = torch.Generator().manual_seed(0)
        latents: torch.Tensor = pipeline(
            prompt_embeds=torch.randn(1, 5, 24, generator=random).bfloat16(),
            pooled_prompt_embeds=torch.randn(1, 40, generator=random).bfloat16(),
            height=64,
            width=96,
            num_inference_steps=NUM_STEPS,
            generator=random,
            output_type="latent",
        ).images
        return latents

    return generate


def wan_pipeline(transformer: nn.Module) -> Callable[[], torch.Tensor]:
    """With guidance: two walks per step."""
    pipeline: Any = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=transformer,
    ).to("cpu")
    pipeline.set_progress_bar_config(disable=True)

    def generate() -> torch.Tensor:
        random = torch.Generator().manual_seed(0)
        latents: torch.Tensor = pipeline(
            prompt_embeds=torch.randn(1, 5, 32, generator=random).bfloat16(),
            negative_prompt_embeds=torch.zeros(1, 5, 32).bfloat16(),
            height=32,
            width=48,
            num_frames=5,
            num_inference_steps=NUM_STEPS,
            guidance_scale=4.0,
            generator=random,
            output_type="latent",
        ).frames
        return latents

    return generate


@pytest.mark.parametrize(
    ("model", "make", "walks", "anyio_backend"),
    [(FLUX_MODEL, flux_pipeline, NUM_STEPS, "asyncio"), (WAN_MODEL, wan_pipeline, 2 * NUM_STEPS, "trio")],
    ids=["Flux", "Wan"],
)
async def test_a_pipeline_around_a_streamed_transformer_gives_the_same_latents(
    model: Any, make: Callable[[nn.Module], Callable[[], torch.Tensor]], walks: int, saved: Saved
) -> None:
    directory = saved(Variant(model, torch.bfloat16, sharded=True))
    resident = aligned_reference(model.load(directory, torch.bfloat16))
    expected = in_worker(make(resident))
    assert expected.isfinite().all()
    build = diffusers_builder(directory, torch.bfloat16)
    async with streamflow.open_streamed(build, directory) as (offload, transformer):
        generate = make(transformer)
        for _ in range(NUM_REQUESTS):
            assert sha256_of(await offload.run(generate)) == sha256_of(expected)
        statistics = offload.statistics()
    check_statistics(statistics, streams=True)
    assert statistics.choice.source == "checkpoint"
    assert statistics.engine.num_walks == NUM_REQUESTS * walks
    assert statistics.engine.num_on_demand_fetches == 0
