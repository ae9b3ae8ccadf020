"""``streamflow bench startup``: from the call that opens a model to its first finished step, for each way to start.

Every start is a fresh process, with the files in the page cache; importing is not counted, everything else is: building
the skeleton, the probe, registering, the tensors outside the blocks, the first step. The ways: straight from the
checkpoint, registered and not; through the store when it has no entry yet (which writes one), and when it has.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import click
import torch
from safetensors.torch import save_file

import streamflow
from streamflow.tools.bench.children import ask_child
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.flux_shaped import SMALL, FluxShape, random_model
from streamflow.tools.terminal import format_seconds, plain_table, print_json, result_console

WORKER = "streamflow.tools.bench.startup_worker"
#: A start that takes longer has failed.
START_TIMEOUT_S = 240.0
STORE: dict[str, Any] = {"store_mode": "preferred"}
WAYS: dict[str, dict[str, Any]] = {
    "checkpoint": {},
    "checkpoint, not registered": {"host_registration_limit_bytes": 0},
    "store, first time": STORE,
    "store": STORE,
    "store, not registered": {**STORE, "host_registration_limit_bytes": 0},
}


async def measure_startup(shape: FluxShape, dtype: str, image_px: int, device: str, folder: Path) -> dict[str, Any]:
    """All starts of a model that is made in ``folder``, one after the other."""
    made = await anyio.to_thread.run_sync(partial(_save, shape, dtype, torch.device(device), folder / "checkpoint"))
    readings = [
        await _start(way, {**options, "device": device}, shape, dtype, image_px, folder)
        for way, options in WAYS.items()
    ]
    return {
        "benchmark": "startup",
        "environment": environment(torch.device(device)),
        "model_bytes": made,
        "readings": readings,
    }


def _save(shape: FluxShape, dtype: str, device: torch.device, folder: Path) -> int:
    folder.mkdir(parents=True)
    tensors = random_model(shape, getattr(torch, dtype), device).state_dict()
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


async def _start(
    way: str, options: dict[str, Any], shape: FluxShape, dtype: str, image_px: int, folder: Path
) -> dict[str, Any]:
    store = {"root": str(folder / "store"), "free_space_headroom_bytes": 0, "free_space_headroom_fraction": 0.0}
    question = {
        "checkpoint": str(folder / "checkpoint"),
        "shape": attrs.asdict(shape),
        "dtype": dtype,
        "image_px": image_px,
        "num_text": 512,
        "options": {**options, "store": store},
    }
    found = await ask_child(WORKER, question, START_TIMEOUT_S)
    return {"way": way, "problem": found.problem, **(found.values or {})}


@click.command("startup")
@click.option("--device", default=None, help="cuda, cuda:N or cpu; default: cuda where there is one.")
@click.option("--px", "image_px", type=click.IntRange(64), default=None, help="Picture size.  [default: by the device]")
@click.option("--folder", type=click.Path(path_type=Path), help="Where files are made.  [default: of temporary files]")
@click.option("--json", "as_json", is_flag=True, help="Print the readings as one JSON object.")
def startup(*, device: str | None, image_px: int | None, folder: Path | None, as_json: bool) -> None:
    """From opening a FLUX.1-shaped transformer to its first finished step, from the checkpoint and from the store.

    On CUDA the full size (23.7 GB on disk, twice); on the CPU a small one in float32.
    """
    torch_device = streamflow.OffloadConfig(device=device).torch_device()
    on_cuda = torch_device.type == "cuda"
    shape, dtype = (FluxShape(), "bfloat16") if on_cuda else (SMALL, "float32")
    image_px = image_px or (1024 if on_cuda else 256)
    with tempfile.TemporaryDirectory(prefix="streamflow-bench-", dir=folder) as made:
        report = anyio.run(measure_startup, shape, dtype, image_px, str(torch_device), Path(made))
    if as_json:
        print_json(report)
    else:
        _print(report)
    digests = {reading.get("digest") for reading in report["readings"]}
    if len(digests) != 1 or any(reading["problem"] for reading in report["readings"]):
        raise click.exceptions.Exit(1)


def _print(report: dict[str, Any]) -> None:
    table = plain_table("from", "transfer", "open", "to first step", "second step", "registering", "peak", num_left=2)
    for reading in report["readings"]:
        if reading["problem"] is not None:
            table.add_row(reading["way"], reading["problem"])
            continue
        seconds = (reading["open_s"], reading["to_first_step_s"], reading["second_step_s"])
        registering = format_seconds(reading["registration"]["seconds"])
        peak = f"{reading['device_peak_bytes'] / 1e9:.2f} GB"
        table.add_row(reading["way"], reading["transfer"], *map(format_seconds, seconds), registering, peak)
    result_console().print(table)
