"""``streamflow bench step --ranks``: one step of each of several ranks, which gather the blocks together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

import streamflow
from streamflow.tools.bench.flux_shaped import SMALL, FluxShape
from streamflow.tools.bench.joint_step_rank import JointStepQuestion, measure_rank
from streamflow.tools.bench.rank_processes import RankPlace, ask_ranks
from streamflow.tools.terminal import plain_table, result_console

WORKER = "streamflow.tools.bench.joint_step_rank"
#: Gathered at once, in MiB, by the device.
CHUNKS_MIB = {"cpu": (1,), "cuda": (32, 64, 128)}


def joint_question(
    device: str | None, image_px: int | None, shared: str, chunk_mib: Sequence[int], folder: Path | None, **counts: int
) -> JointStepQuestion:
    """What to ask the ranks, with defaults by the device. ``counts``: window, rounds and steps of each."""
    kind = streamflow.OffloadConfig(device=device).torch_device().type
    return JointStepQuestion(
        device=kind,
        shape=attrs.asdict(FluxShape() if kind == "cuda" else SMALL),
        image_px=image_px or (1024 if kind == "cuda" else 128),
        shared=shared,
        chunk_bytes=[mib << 20 for mib in chunk_mib or CHUNKS_MIB[kind]],
        folder=None if folder is None else str(folder),
        **counts,
    )


async def measure_jointly(question: JointStepQuestion, size: int, limit_s: float) -> dict[str, Any] | None:
    """The report of ``size`` ranks: of torchrun's, on its first rank (None on the others), or of processes made here,
    which are killed after ``limit_s``.
    """
    place = RankPlace.of_torchrun()
    if place is not None:
        report = await measure_rank(question, place)
        return report if place.rank == 0 else None
    return await ask_ranks("joint step", WORKER, question, size, limit_s)


def print_joint_report(report: dict[str, Any]) -> None:
    """The report for people."""
    if report["readings"]:
        alone = ", ".join(f"{rate / 1e9:.1f}" for rate in report["link_bytes_per_s"])
        together = ", ".join(f"{rate / 1e9:.1f}" for rate in report["links_together_bytes_per_s"])
        title = f"one step of {report['ranks']} ranks, links {alone} GB/s, all at once {together} GB/s"
        columns = ("", "x one link's limit", "x resident", "step", "resident", "walks/step", "private", "equal")
        table = plain_table(*columns, title=title)
        for reading in report["readings"]:
            table.add_row(*_cells(reading))
        result_console().print(table)
    if report["problem"] is not None:
        result_console().print(f"not done: {report['problem']}")


def _cells(reading: dict[str, Any]) -> list[str]:
    chunk = reading["chunk_bytes"]
    return [
        reading["transfer"] + ("" if chunk is None else f", {chunk >> 20} MiB"),
        f"{reading['ratio_to_link_limit']:.3f}",
        f"{reading['ratio_to_resident']:.3f}",
        f"{reading['step_s'] * 1e3:.1f} ms",
        f"{reading['resident_s'] * 1e3:.1f} ms",
        f"{reading['num_walks_per_step']:.2f}",
        f"{reading['private_bytes'] / 1e6:.0f} MB",
        "yes" if reading["equal"] else "NO",
    ]
