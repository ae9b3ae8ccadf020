"""A text-to-image pipeline from the directory that diffusers saved it in; its transformer streams from there."""

from __future__ import annotations

import copy
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import torch
from diffusers import DiffusionPipeline
from torch import nn

import streamflow
from serve.inputs import Inputs
from serve.model import OnStep, Opened
from streamflow.diffusers_models import diffusers_builder


class PipelineModel:
    """Draws what the prompt says. Each picture has a scheduler of its own, so that several can be drawn at once."""

    def __init__(self, name: str, pipeline: Any) -> None:
        self.name = name
        self._pipeline = pipeline

    def check(self, inputs: Inputs) -> None:
        """Any prompt will do."""

    def draw(self, inputs: Inputs, on_step: OnStep) -> bytes:
        pipeline = copy.copy(self._pipeline)
        pipeline.scheduler = copy.deepcopy(self._pipeline.scheduler)
        pipeline.set_progress_bar_config(disable=True)

        def after_step(_pipeline: Any, step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
            on_step(step + 1, inputs.num_steps)
            return values

        (image,) = pipeline(
            prompt=inputs.prompt,
            num_inference_steps=inputs.num_steps,
            guidance_scale=inputs.guidance,
            width=inputs.width,
            height=inputs.height,
            generator=torch.Generator().manual_seed(inputs.seed),
            callback_on_step_end=after_step,
        ).images
        png = io.BytesIO()
        image.save(png, "PNG")
        return png.getvalue()


@asynccontextmanager
async def open_pipeline(directory: Path, dtype: torch.dtype, config: streamflow.OffloadConfig) -> AsyncIterator[Opened]:
    """The pipeline, its transformer streaming while this is open, everything else on the device."""
    build = await anyio.to_thread.run_sync(diffusers_builder, directory / "transformer", dtype)
    async with streamflow.open_streamed(build, directory / "transformer", config) as (offload, transformer):
        load = partial(_load, directory, dtype, transformer, config.torch_device())
        pipeline = await anyio.to_thread.run_sync(load)
        yield Opened(offload, PipelineModel(directory.name, pipeline))


def _load(directory: Path, dtype: torch.dtype, transformer: nn.Module, device: torch.device) -> Any:
    pipeline: Any = DiffusionPipeline.from_pretrained(directory, transformer=transformer, torch_dtype=dtype)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module) and component is not transformer:
            component.to(device)
    return pipeline
