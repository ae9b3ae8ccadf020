"""A text-to-image pipeline from the directory that diffusers saved it in, whole: what does not fit streams."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import torch
from diffusers import DiffusionPipeline

import streamflow
from serve.inputs import Inputs
from serve.model import OnStep, Opened


class PipelineModel:
    """Draws what the prompt says. Each picture has a scheduler of its own, so that several can be drawn at once."""

    def __init__(self, name: str, pipeline: Any) -> None:
        self.name = name
        self._pipeline = pipeline

    def check(self, inputs: Inputs) -> None:
        """Any prompt will do."""

    def draw(self, inputs: Inputs, on_step: OnStep) -> bytes:
        def after_step(_pipeline: Any, step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
            on_step(step + 1, inputs.num_steps)
            return values

        (image,) = self._another_pipeline()(
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

    def _another_pipeline(self) -> Any:
        """One over the same components, but for the scheduler, which keeps the state of its loop."""
        scheduler = type(self._pipeline.scheduler).from_config(self._pipeline.scheduler.config)
        another = type(self._pipeline)(**{**self._pipeline.components, "scheduler": scheduler})
        another.set_progress_bar_config(disable=True)
        return another


@asynccontextmanager
async def open_pipeline(directory: Path, dtype: torch.dtype, config: streamflow.OffloadConfig) -> AsyncIterator[Opened]:
    """The pipeline, loaded on the host and streaming while this is open."""
    load = partial(DiffusionPipeline.from_pretrained, directory, dtype=dtype)
    pipeline: Any = await anyio.to_thread.run_sync(load)
    async with streamflow.open_offload(pipeline, config) as offload:
        yield Opened(offload, PipelineModel(directory.name, pipeline))
