"""``streamflow bench step``: one step of a FLUX.1-shaped transformer, streamed against resident and the link limit.

Both models are in one process and their steps are interleaved in rounds. Within a round steps follow each other without
a host wait, as in a denoising loop, and are timed from end to end on the device's clock; the first of each round is
left out, because blocks were prefetched for it while the other model ran. Readings are told, and saved, as they come.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import click
import torch

import streamflow
from streamflow.tools.bench.flux_shaped import SMALL, FluxShape
from streamflow.tools.bench.joint_step import joint_question, measure_jointly, print_joint_report
from streamflow.tools.bench.saved_report import SavedReport
from streamflow.tools.bench.step_measurement import StepMeasurement, StepOptions
from streamflow.tools.bench.step_sources import SOURCES
from streamflow.tools.bench.time_limit import TimeLimit
from streamflow.tools.terminal import plain_table, print_json, result_console, shown_progress

#: How long ranks that were started here may take, in seconds.
RANKS_LIMIT_S = 600.0


def _options(
    *,
    image_px: Sequence[int],
    source: Sequence[str],
    transfer: Sequence[str],
    window: int,
    residents: int,
    rounds: int,
    packing_threads: Sequence[int],
    chunk_mib: Sequence[int],
    device: str | None,
    peers: bool,
    peer_steps: int,
    folder: Path,
) -> StepOptions:
    on_cuda = streamflow.OffloadConfig(device=device).torch_device().type == "cuda"
    return StepOptions(
        shape=FluxShape() if on_cuda else SMALL,
        dtype=torch.bfloat16 if on_cuda else torch.float32,
        image_px=tuple(image_px) or ((1024, 2048) if on_cuda else (256,)),
        sources=tuple(source) or ("module",),
        transfers=tuple(transfer) or ("direct", "staged"),
        packing_threads=tuple(packing_threads) or (None,),
        staging_chunk_bytes=tuple(mib << 20 for mib in chunk_mib) or (streamflow.OffloadConfig().staging_chunk_bytes,),
        window_blocks=window,
        resident_blocks=residents,
        num_rounds=rounds,
        steps_per_round=4,
        device=device,
        peers=peers,
        steps_per_peer=peer_steps,
        folder=folder,
    )


@click.command("step")
@click.option("--px", "image_px", type=click.IntRange(64), multiple=True, help="Picture size; repeat to sweep.")
@click.option("--source", type=click.Choice(SOURCES), multiple=True, help="Repeat to sweep.  [default: module]")
@click.option("--transfer", type=click.Choice(["direct", "staged"]), multiple=True, help="Repeat to sweep.")
@click.option("--window", type=click.IntRange(1), default=2, show_default=True, help="Slots of the window.")
@click.option("--residents", type=click.IntRange(0), default=0, show_default=True, help="Blocks that stay.")
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Rounds of four steps each.")
@click.option(
    "--packing-threads", type=click.IntRange(1), multiple=True, help="Of the staged transfer; repeat to sweep."
)
@click.option(
    "--chunk-mib", type=click.IntRange(1), multiple=True, help="Chunk of the staged transfer; repeat to sweep."
)
@click.option("--device", default=None, help="cuda, cuda:N or cpu; default: cuda where there is one.")
@click.option("--peers", is_flag=True, help="Also diffusers' group offload and accelerate's cpu_offload, if installed.")
@click.option("--peer-steps", type=click.IntRange(2), default=3, show_default=True, help="Steps of a peer.")
@click.option("--limit", type=click.FloatRange(0), help="Seconds after which no reading begins, and peers are ended.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where files are made.  [default: of temporary files]")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The JSON object, after each reading.")
@click.option("--ranks", type=click.IntRange(2), help="Ranks that gather: torchrun's, or processes made here.")
@click.option(
    "--gather-chunk-mib", type=click.IntRange(1), multiple=True, help="Gathered at once by ranks; repeat to sweep."
)
@click.option("--json", "as_json", is_flag=True, help="Print the readings as one JSON object.")
def step(
    *,
    folder: Path | None,
    output: Path | None,
    limit: float | None,
    ranks: int | None,
    gather_chunk_mib: Sequence[int],
    as_json: bool,
    **options: Any,
) -> None:
    """One step of a FLUX.1-shaped transformer: streamed against resident and the link limit, in one run.

    On CUDA the full size (23.7 GB of random bfloat16); on the CPU a small one in float32. A checkpoint, and a store,
    take as much on disk each.
    """
    if ranks is not None:
        _step_of_ranks(ranks, gather_chunk_mib, folder, limit, as_json, options)
        return
    report = SavedReport(output)
    with tempfile.TemporaryDirectory(prefix="streamflow-bench-", dir=folder) as made, shown_progress() as bars:
        chosen = _options(folder=Path(made), **options)
        measurement = StepMeasurement(
            chosen, TimeLimit(limit), report, lambda reading: bars.console.print(_line(reading))
        )
        anyio.run(measurement.measure)
    if as_json:
        print_json(report.values)
    else:
        _print(report.values)
    if not all(reading["equal"] for reading in report.values["readings"]):
        raise click.exceptions.Exit(1)


def _step_of_ranks(
    ranks: int, chunk_mib: Sequence[int], folder: Path | None, limit: float | None, as_json: bool, given: dict[str, Any]
) -> None:
    sources, sizes = given["source"] or ("store",), given["image_px"] or (None,)
    if len(sources) + len(sizes) > 2 or sources[0] == "checkpoint":
        raise click.UsageError("with --ranks there is one --px and one --source, the module or the store")
    question = joint_question(
        given["device"],
        sizes[0],
        sources[0],
        chunk_mib,
        folder,
        window_blocks=given["window"],
        num_rounds=given["rounds"],
        steps_per_round=4,
    )
    report = anyio.run(measure_jointly, question, ranks, limit or RANKS_LIMIT_S)
    if report is None:
        return
    if as_json:
        print_json(report)
    else:
        print_joint_report(report)
    if report["problem"] is not None or not all(reading["equal"] for reading in report["readings"]):
        raise click.exceptions.Exit(1)


def _line(reading: dict[str, Any]) -> str:
    """A reading in a line, for who waits."""
    cells = _peer_cells(reading) if "peer" in reading else _cells(reading)
    return ", ".join(filter(None, (f"{cells[0]} {cells[1]} px", *(f"{cell}x" for cell in cells[2:4]), *cells[4:5])))


def _print(report: dict[str, Any]) -> None:
    title = f"one step, link {report['link_bytes_per_s'] / 1e9:.1f} GB/s"
    columns = ("", "px", "x link limit", "x resident", "step", "resident", "hooks/block", "peak", "equal")
    table = plain_table(*columns, title=title)
    for reading in report["readings"]:
        table.add_row(*_cells(reading))
    for peer in report["peers"]:
        table.add_row(*_peer_cells(peer))
    result_console().print(table)
    for what in report["left_out"]:
        result_console().print(f"left out, for the time was over: {what}")


def _cells(reading: dict[str, Any]) -> list[str]:
    staging = "" if reading["staging_chunk_bytes"] is None else _staging(reading)
    return [
        f"{reading['transfer']} from {reading['source']}{staging}",
        str(reading["image_px"]),
        f"{reading['ratio_to_link_limit']:.3f}",
        f"{reading['ratio_to_resident']:.3f}",
        f"{reading['streamed_s'] * 1e3:.1f} ms",
        f"{reading['resident_s'] * 1e3:.1f} ms",
        f"{reading['hooks_cpu_us_per_block']:.0f} us",
        f"{reading['device_peak_bytes'] / 1e9:.2f} GB",
        "yes" if reading["equal"] else "NO",
    ]


def _staging(reading: dict[str, Any]) -> str:
    return f", {reading['packing_threads']} x {reading['staging_chunk_bytes'] >> 20} MiB"


def _peer_cells(peer: dict[str, Any]) -> list[str]:
    if peer["problem"] is not None:
        return [f"{peer['peer']}: {peer['problem']}", str(peer["image_px"])]
    peak = peer["device_peak_bytes"]
    return [
        f"{peer['peer']} {peer['version']}",
        str(peer["image_px"]),
        f"{peer['ratio_to_link_limit']:.3f}",
        f"{peer['ratio_to_resident']:.3f}",
        f"{peer['step_s'] * 1e3:.1f} ms",
        "",
        "",
        "" if peak is None else f"{peak / 1e9:.2f} GB",
        "yes" if peer["equal"] else "NO",
    ]
