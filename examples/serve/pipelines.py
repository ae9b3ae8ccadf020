"""A text-to-image pipeline from the directory that diffusers saved it in, whole: what does not fit streams."""

from __future__ import annotations

import copy
import inspect
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
    """Draws what the prompt says. Several are drawn at once: all but the models is each picture's own."""

    def __init__(self, name: str, pipeline: Any) -> None:
        self.name = name
        self._pipeline = pipeline

    def check(self, inputs: Inputs) -> None:
        """Any prompt will do."""

    def draw(self, inputs: Inputs, on_step: OnStep) -> bytes:
        def after_step(_pipeline: Any, step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
            on_step(step + 1, inputs.num_steps)
            return values

        (image,) = another_pipeline(self._pipeline)(
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


def another_pipeline(pipeline: Any) -> Any:
    """One over the same models, with all else of its own: scheduler and tokenizers keep state while they are used."""
    known = inspect.signature(type(pipeline)).parameters
    options = {name: value for name, value in pipeline.config.items() if name in known}
    parts = pipeline.components
    own = {name: copy.deepcopy(part) for name, part in parts.items() if not isinstance(part, torch.nn.Module)}
    another = type(pipeline)(**{**options, **parts, **own})
    another.set_progress_bar_config(disable=True)
    return another


@asynccontextmanager
async def open_pipeline(directory: Path, dtype: torch.dtype, config: streamflow.OffloadConfig) -> AsyncIterator[Opened]:
    """The pipeline, loaded on the host and streaming while this is open."""
    load = partial(DiffusionPipeline.from_pretrained, directory, dtype=dtype)
    pipeline: Any = await anyio.to_thread.run_sync(load)
    async with streamflow.open_offload(pipeline, config) as offload:
        yield Opened(offload, PipelineModel(directory.name, pipeline))
