"""Runs whose cause is known: made by the real engine on the cpu device, with a modelled link and blocks that sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import torch

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.tools.bench.sleeping import SleepingModel

#: Bytes of a block.
NBYTES = 1 << 20
NUM_BLOCKS = 8
NUM_WALKS = 3

#: What else goes on while the model runs, on the loop; it is cancelled when the model is done.
Meanwhile = Callable[[], Any]


async def run_model(
    path: Path,
    *,
    compute_s: float,
    transfer_s: float,
    options: Mapping[str, Any] | None = None,
    orders: Sequence[Sequence[int]] | None = None,
    meanwhile: Meanwhile | None = None,
    num_requests: int = 1,
) -> None:
    """Write the trace of a few walks to ``path``.

    Each block computes for ``compute_s`` and takes ``transfer_s`` on the link. ``orders``: the blocks of each walk, if
    not all in turn. ``meanwhile`` runs on the loop beside it. ``num_requests`` do all this at once.
    """
    model = SleepingModel(NUM_BLOCKS, NBYTES, compute_s)
    device = CpuDevice(link_bytes_per_s=NBYTES / transfer_s, compute_units=1)
    settings = {"device": "cpu", "trace_path": path, **(options or {})}

    def walks() -> None:
        with torch.no_grad():
            for order in orders or [range(NUM_BLOCKS)] * NUM_WALKS:
                model(torch.zeros(1), order)

    opened = streamflow.open_offload(model, settings, device=device)
    async with opened as offload, anyio.create_task_group() as tasks:
        if meanwhile is not None:
            tasks.start_soon(meanwhile)
        async with anyio.create_task_group() as requests:
            for _ in range(num_requests):
                requests.start_soon(offload.run, walks)
        tasks.cancel_scope.cancel()


async def block_the_loop() -> None:
    """What no task should do: keeps the loop from answering, most of the time."""
    while True:
        time.sleep(0.06)  # noqa: ASYNC251 - the point of it
        await anyio.lowlevel.checkpoint()
