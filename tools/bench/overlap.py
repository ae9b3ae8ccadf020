"""``streamflow bench overlap``: how well transfer and compute overlap on the cpu device, both modelled by sleeping.

One compute unit and one link: a perfect walk takes the larger of all transfers and all computing.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import anyio
import attrs
import click
import torch

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.tools.bench.sleeping import SleepingModel
from streamflow.tools.terminal import shown_progress

#: What is aimed at, as the walk's time over the larger of transfer and compute.
AIMS = {1.0: 1.10, 3.0: 1.05}


@attrs.frozen
class OverlapReading:
    """Seconds of walks 2 to 4 (median), of all transfers and all computing; ``ratio`` is to the larger of the two."""

    transfer_to_compute: float
    num_blocks: int
    window_blocks: int
    transfer_s: float
    compute_s: float
    walk_s: float
    ratio: float
    aim: float
    streamed_bytes: int


async def measure_overlap(
    transfer_to_compute: float, *, num_blocks: int = 24, window_blocks: int = 2, block_s: float = 0.02
) -> OverlapReading:
    """One reading: every block's transfer takes ``transfer_to_compute`` times as long as its computing, ``block_s``."""
    nbytes = 1 << 20
    device = CpuDevice(link_bytes_per_s=nbytes / (block_s * transfer_to_compute), compute_units=1)
    model = SleepingModel(num_blocks, nbytes, block_s)
    x = torch.zeros(1)

    def walks() -> list[float]:
        ends = []
        for _ in range(4):
            model(x)
            ends.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(ends)]

    async with streamflow.open_offload(
        model, {"window_blocks": window_blocks, "device": "cpu"}, device=device
    ) as offload:
        with torch.no_grad():
            seconds = await offload.run(walks)
        streamed_bytes = offload.statistics().engine.streamed_bytes
    transfer_s, compute_s = num_blocks * block_s * transfer_to_compute, num_blocks * block_s
    walk_s = statistics.median(seconds)
    ratio = walk_s / max(transfer_s, compute_s)
    return OverlapReading(
        transfer_to_compute=transfer_to_compute,
        num_blocks=num_blocks,
        window_blocks=window_blocks,
        transfer_s=transfer_s,
        compute_s=compute_s,
        walk_s=walk_s,
        ratio=ratio,
        aim=AIMS.get(transfer_to_compute, float("nan")),
        streamed_bytes=streamed_bytes,
    )


async def measure_all(on_reading: Callable[[], None] = lambda: None) -> list[OverlapReading]:
    """The readings that have an aim; ``on_reading`` is called after each."""
    readings = []
    for ratio in AIMS:
        readings.append(await measure_overlap(ratio))
        on_reading()
    return readings


@click.command("overlap")
@click.option("--json", "as_json", is_flag=True, help="Print the readings as one JSON object.")
def overlap(*, as_json: bool) -> None:
    """Overlap of transfer and compute, both modelled on the CPU: walk time over the larger of the two."""
    with shown_progress() as progress:
        bar = progress.add_task("readings", total=len(AIMS))
        readings = anyio.run(measure_all, lambda: progress.advance(bar))
    if as_json:
        report: dict[str, Any] = {"benchmark": "overlap", "readings": [attrs.asdict(reading) for reading in readings]}
        click.echo(json.dumps(report, indent=2))
        return
    for reading in readings:
        click.echo(
            f"transfer {reading.transfer_to_compute:g}x compute: a walk of {reading.num_blocks} blocks takes "
            f"{reading.walk_s:.3f} s, {reading.ratio:.3f}x the larger of the two (aim {reading.aim})"
        )
