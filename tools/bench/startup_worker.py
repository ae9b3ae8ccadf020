"""One start of ``streamflow bench startup``: opens the model in a fresh process, and says how long each part took."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import torch
from torch import nn

import streamflow
from streamflow.tools.bench.children import answer
from streamflow.tools.bench.digests import digest_of
from streamflow.tools.bench.flux_shaped import FluxShape, FluxShaped, random_inputs


@attrs.frozen
class Start:
    """What is started: ``options`` are those of the offload."""

    checkpoint: str
    shape: dict[str, Any]
    dtype: str
    image_px: int
    num_text: int
    options: dict[str, Any]


async def start(asked: Start) -> dict[str, Any]:
    """Seconds from the call of `open_streamed` on: until the model is open, until its first step is finished, and that
    of a second step. Importing is over before.
    """
    shape, dtype = FluxShape(**asked.shape), getattr(torch, asked.dtype)
    config = streamflow.OffloadConfig.from_mapping(asked.options)
    began = time.perf_counter()
    opened = streamflow.open_streamed(lambda: FluxShaped(shape).to(dtype), Path(asked.checkpoint), config)
    async with opened as (offload, model):
        open_s = time.perf_counter() - began
        inputs = random_inputs(shape, asked.image_px, asked.num_text, dtype, config.torch_device())
        step = partial(_step, model, inputs)
        result = await offload.run(step)
        first_step_s = time.perf_counter() - began
        again = time.perf_counter()
        await offload.run(step)
        second_step_s = time.perf_counter() - again
        found = offload.statistics()
    return {
        "open_s": open_s,
        "to_first_step_s": first_step_s,
        "second_step_s": second_step_s,
        "close_s": time.perf_counter() - again - second_step_s,
        "digest": digest_of(result),
        "source": found.choice.source,
        "transfer": found.choice.transfer,
        "transfer_reason": found.choice.transfer_reason,
        "registration": attrs.asdict(found.registration),
        "store": None if found.store is None else str(found.store.outcome),
        "device_peak_bytes": found.engine.device_peak_bytes,
    }


@torch.no_grad()
def _step(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    result: torch.Tensor = model(*inputs)
    return result


if __name__ == "__main__":
    answer(anyio.run(start, Start(**json.loads(sys.argv[1]))))
