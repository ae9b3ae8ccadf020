"""``streamflow bench gather``: what ranks gain by bringing slices of a block and gathering the rest from each other.

The link alone, the gather alone and both overlapped, as the gathered transfer does it, for several chunk sizes; all of
one run, as ratios to a rank that copies everything itself. Started by torchrun it is one rank of the job, else it
starts ranks of its own on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import click

import streamflow
from streamflow.tools.bench.gather_rank import GatherQuestion, measure_rank
from streamflow.tools.bench.rank_processes import RankPlace, ask_ranks
from streamflow.tools.terminal import format_seconds, plain_table, print_json, result_console

WORKER = "streamflow.tools.bench.gather_rank"
#: Chunk sizes, in MiB, and the size of an image, by the device.
CHUNKS_MIB = {"cpu": (1, 4), "cuda": (8, 32, 64, 128, 256)}
SIZE_MIB = {"cpu": 8, "cuda": 512}


async def measure_ranks(question: GatherQuestion, size: int, limit_s: float) -> dict[str, Any]:
    """The report of ``size`` ranks in processes of their own, which are killed after ``limit_s``."""
    return await ask_ranks("gather", WORKER, question, size, limit_s)


@click.command("gather")
@click.option("--ranks", "size", type=click.IntRange(2), default=None, help="Processes to start.  [default: 2]")
@click.option("--device", default=None, help="cuda or cpu; default: cuda where there is one.")
@click.option("--size-mib", type=click.IntRange(1), default=None, help="Size of the image.  [default: by the device]")
@click.option("--chunk-mib", type=click.IntRange(1), multiple=True, help="Repeat to sweep.  [default: by the device]")
@click.option("--fetches", type=click.IntRange(1), default=8, show_default=True, help="For each reading.")
@click.option(
    "--step-limit", "step_limit_s", type=click.FloatRange(1), default=20.0, show_default=True, help="Seconds for each."
)
@click.option(
    "--limit", "limit_s", type=click.FloatRange(1), default=240.0, show_default=True, help="Seconds for the processes."
)
@click.option("--json", "as_json", is_flag=True, help="Print the readings as one JSON object.")
def gather(
    *,
    size: int | None,
    device: str | None,
    size_mib: int | None,
    chunk_mib: Sequence[int],
    fetches: int,
    step_limit_s: float,
    limit_s: float,
    as_json: bool,
) -> None:
    """What ranks gain by bringing slices of a block and gathering the rest: the link, the gather, both overlapped.

    Under torchrun (``torchrun --nproc-per-node 2 -m streamflow bench gather``) this process is one of the ranks, and
    the first one prints. Otherwise it starts ranks itself.
    """
    kind = streamflow.OffloadConfig(device=device).torch_device().type
    question = GatherQuestion(
        kind,
        (size_mib or SIZE_MIB[kind]) << 20,
        [mib << 20 for mib in chunk_mib or CHUNKS_MIB[kind]],
        fetches,
        step_limit_s,
    )
    place = RankPlace.of_torchrun()
    if place is not None and size not in (None, place.size):
        raise click.UsageError(f"--ranks {size} beside torchrun, which started {place.size} ranks; leave --ranks out")
    if place is None:
        report = anyio.run(measure_ranks, question, size or 2, limit_s)
    else:
        report = anyio.run(measure_rank, question, place)
    if place is None or place.rank == 0:
        if as_json:
            print_json(report)
        else:
            _print(report)
    if report["problem"] is not None or not all(reading["equal"] for reading in report["readings"]):
        raise click.exceptions.Exit(1)


def _print(report: dict[str, Any]) -> None:
    console = result_console()
    if report["readings"]:
        title = f"{report['ranks']} ranks, {report['nbytes'] >> 20} MiB, {report['environment']['device']}"
        table = plain_table("chunk", "link, a rank", "gather", "both", "to whole", "equal", num_left=0, title=title)
        for reading in report["readings"]:
            rates = [_rate(reading[name]) for name in ("link_bytes_per_s", "gather_bytes_per_s", "both_bytes_per_s")]
            equal = "yes" if reading["equal"] else "NO"
            table.add_row(f"{reading['chunk_bytes'] >> 20} MiB", *rates, f"{reading['ratio_to_whole']:.3f}", equal)
        console.print(table)
        latency = format_seconds(report["gather_latency_s"])
        console.print(f"whole images: {_rate(report['whole_bytes_per_s'])}; a small gather: {latency}")
    if report["problem"] is not None:
        console.print(f"not done: {report['problem']}")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
