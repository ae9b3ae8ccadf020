"""The tiny model that comes with streamflow: it draws the digits of the prompt."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread

import streamflow
from serve.errors import UnsuitableInputsError
from serve.inputs import Inputs
from serve.model import OnStep, Opened
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.tools.demo.alignment import align_weights
from streamflow.tools.demo.checkpoint import load_demo_model
from streamflow.tools.demo.model import DigitTransformer
from streamflow.tools.demo.picture import draw_grid
from streamflow.tools.demo.sampling import sample

#: As many digits as fit into a row.
MAX_DIGITS = 16


class DigitModel:
    """Draws a row of digits."""

    name = "digits"

    def __init__(self, model: DigitTransformer) -> None:
        self._model = model

    def check(self, inputs: Inputs) -> None:
        problems = {}
        if not inputs.prompt.isdecimal() or not inputs.prompt.isascii() or len(inputs.prompt) > MAX_DIGITS:
            problems["prompt"] = f"this model draws digits, at most {MAX_DIGITS}"
        for name in ("width", "height"):
            if getattr(inputs, name) is not None:
                problems[name] = "this model's pictures have one size"
        if problems:
            raise UnsuitableInputsError(problems)

    def draw(self, inputs: Inputs, on_step: OnStep) -> bytes:
        labels = [int(digit) for digit in inputs.prompt]
        drawn = sample(
            self._model,
            labels,
            seed=inputs.seed,
            num_steps=inputs.num_steps,
            guidance=inputs.guidance,
            on_step=on_step,
        )
        png = io.BytesIO()
        draw_grid(drawn, num_columns=len(labels)).save(png, "PNG")
        return png.getvalue()


@asynccontextmanager
async def open_digits(config: streamflow.OffloadConfig) -> AsyncIterator[Opened]:
    """The model, streaming while this is open."""
    model = await anyio.to_thread.run_sync(load_digits)
    async with streamflow.open_offload(model, config) as offload:
        yield Opened(offload, DigitModel(model))


def load_digits() -> DigitTransformer:
    """The model on the host. Blocks."""
    model = load_demo_model()
    # On a CPU the last bits of a result may depend on where a weight begins: the same in every process, then.
    align_weights(model, CpuDevice())
    return model
