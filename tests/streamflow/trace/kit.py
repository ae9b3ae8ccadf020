"""Traced offloads of a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import streamflow
from streamflow.stages.devices.base import Device
from streamflow.tools.bench.sleeping import SleepingModel
from streamflow.trace.file import read_json
from streamflow.trace.schema import problems_of

NUM_BLOCKS, NBYTES = 4, 1024


def small_model() -> SleepingModel:
    """Four blocks of 1,024 bytes."""
    return SleepingModel(NUM_BLOCKS, NBYTES, 0.0)


def walk(model: SleepingModel, num_walks: int = 1) -> None:
    """A few passes."""
    with torch.no_grad():
        for _ in range(num_walks):
            model(torch.zeros(1))


def sound_trace(path: Path) -> dict[str, Any]:
    """The trace in ``path``, which must be of the schema."""
    trace = read_json(path)
    assert problems_of(trace) == []
    return trace


def spans(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    """The spans of a category, by their begin."""
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


async def traced_run(path: Path, device: Device | None = None, **options: Any) -> dict[str, Any]:
    """The trace of two walks."""
    model = small_model()
    config = streamflow.OffloadConfig(device="cpu", trace_path=path, **options)
    async with streamflow.open_offload(model, config, device=device) as offload:
        await offload.run(walk, model, 2)
    return sound_trace(path)
