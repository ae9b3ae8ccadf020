"""The tables of the plan for many nodes, computed from the readings of one device and from what is assumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from streamflow.ranks.options import RankOptions

_READINGS = Path(__file__).resolve().parents[1] / "readings"
_DAY_S = 24 * 3600


@attrs.frozen
class Measured:
    """What one H200 and its host did; see the page on measurements."""

    model_bytes: float
    walk_bytes: float
    link_bytes_per_s: float
    compute_1024_s: float
    compute_2048_s: float
    four_together_per_s: float
    publish_s: float
    first_step_s: float


@attrs.frozen
class Assumed:
    """What is not measured here: the size of the installation, and rates of its parts."""

    num_nodes: int = 1000
    num_devices: int = 8
    storage_bytes_per_s: tuple[float, ...] = (10e9, 100e9, 1e12)
    network_bytes_per_s: float = 50e9
    disk_bytes_per_s: float = 5e9
    years_between_failures: float = 5.0
    restart_s: float = 30.0


def measured() -> Measured:
    """The facts, from the raw readings.

    :raises StopIteration: if a reading is not there.
    """
    step, startup, throughput = (_reading(f"{name}-h200") for name in ("step", "startup", "throughput"))
    small, large = (
        next(r for r in step["readings"] if (r["image_px"], r["transfer"]) == (px, "direct")) for px in (1024, 2048)
    )
    ways = {reading["way"]: reading for reading in startup["readings"]}
    four = next(r for r in throughput["rates"] if (r["case"], r["mode"]) == ("4 x 1024 px", "streamed, together"))
    return Measured(
        model_bytes=startup["model_bytes"],
        walk_bytes=small["streamed_bytes_per_step"],
        link_bytes_per_s=step["link_bytes_per_s"],
        compute_1024_s=small["resident_s"],
        compute_2048_s=large["resident_s"],
        four_together_per_s=four["forwards_per_s"],
        publish_s=ways["store, first time"]["open_s"],
        first_step_s=ways["store"]["to_first_step_s"],
    )


def many_nodes_table(which: str) -> str:
    """One of the page's tables in Markdown: ``facts``, ``steps``, ``start`` or ``failures``.

    :raises KeyError: if there is no such table.
    """
    return _TABLES[which](measured(), Assumed())


def _facts(facts: Measured, assumed: Assumed) -> str:
    return _table(
        ["", "", ""],
        [
            ["weights; of them streamed", f"{_gb(facts.model_bytes)}; {_gb(facts.walk_bytes)}", "measured"],
            ["host link of a device", f"{_gb(facts.link_bytes_per_s)}/s", "measured"],
            [
                "a step's computing, 1024 px; 2048 px",
                f"{facts.compute_1024_s:.3f} s; {facts.compute_2048_s:.3f} s",
                "measured",
            ],
            ["publishing an entry, files in memory", f"{facts.publish_s:.0f} s", "measured"],
            ["start to end of the first step, from an entry in memory", f"{facts.first_step_s:.1f} s", "measured"],
            ["nodes; devices in each", f"{assumed.num_nodes:,}; {assumed.num_devices}", "assumed"],
            [
                "network of a node; local disk",
                f"{_gb(assumed.network_bytes_per_s)}/s; {_gb(assumed.disk_bytes_per_s)}/s",
                "assumed",
            ],
            ["a device, or what it needs, fails every", f"{assumed.years_between_failures:g} years", "assumed"],
            ["starting processes and importing", f"{assumed.restart_s:.0f} s", "assumed"],
        ],
    )


def _steps(facts: Measured, assumed: Assumed) -> str:
    num = assumed.num_devices
    whole, slice_s = (facts.walk_bytes / n / facts.link_bytes_per_s for n in (1, num))
    taken_in = facts.walk_bytes * (num - 1) / num
    small, large = facts.compute_1024_s, facts.compute_2048_s
    alone_s, gathered_s = max(whole, small), max(slice_s, small)
    together = num * facts.four_together_per_s
    return _table(
        ["", "rank-local", f"gathered by {num}"],
        [
            ["over each host link, for a walk", _gb(facts.walk_bytes), _gb(facts.walk_bytes / num)],
            ["which takes", f"{whole:.3f} s", f"{slice_s:.3f} s"],
            ["read from the node's memory, a walk of every rank", _gb(num * facts.walk_bytes), _gb(facts.walk_bytes)],
            ["taken in by each device from the others", "nothing", _gb(taken_in)],
            ["rate of that which computing hides, 1024 px", "", f"{_gb(taken_in / small)}/s"],
            ["the same, 2048 px", "", f"{_gb(taken_in / large)}/s"],
            ["a step at 1024 px, one request a rank, at best", f"{alone_s:.3f} s", f"{gathered_s:.3f} s"],
            ["forwards of a node, one request a rank, at best", f"{num / alone_s:.1f}/s", f"{num / gathered_s:.1f}/s"],
            ["the same, four requests a rank", f"{together:.1f}/s", f"{num / gathered_s:.1f}/s"],
            [
                "the node's memory is read at",
                f"{_gb(num * facts.walk_bytes / alone_s)}/s",
                f"{_gb(facts.walk_bytes / gathered_s)}/s",
            ],
            [
                f"forwards of {assumed.num_nodes:,} nodes, one request a rank",
                f"{assumed.num_nodes * num / alone_s:,.0f}/s",
                f"{assumed.num_nodes * num / gathered_s:,.0f}/s",
            ],
        ],
    )


def _start(facts: Measured, assumed: Assumed) -> str:
    rates = assumed.storage_bytes_per_s
    total = assumed.num_nodes * facts.model_bytes

    def row(title: str, value: Callable[[float], str]) -> list[str]:
        return [title, *map(value, rates)]

    return _table(
        ["shared storage delivers, all together", *(f"{_gb(rate)}/s" for rate in rates)],
        [
            row(f"every node reads the model at once: {total / 1e12:.1f} TB", lambda rate: _duration(total / rate)),
            row(
                "the same, where nothing caches files for the ranks of a node",
                lambda rate: _duration(total * assumed.num_devices / rate),
            ),
            row("a node's share of the rate", lambda rate: f"{_gb(rate / assumed.num_nodes)}/s"),
            row("then each publishes, on its own", lambda _: _duration(facts.publish_s)),
            row(
                "the last first step is done after",
                lambda rate: _duration(total / rate + facts.publish_s + facts.first_step_s),
            ),
            row(
                "nodes that it feeds as fast as they publish",
                lambda rate: f"{min(assumed.num_nodes, rate * facts.publish_s / facts.model_bytes):,.0f}",
            ),
            row("a restart, entry in memory", lambda _: _duration(assumed.restart_s + facts.first_step_s)),
            row(
                "a restart, entry on the local disk",
                lambda _: _duration(
                    assumed.restart_s + facts.first_step_s + facts.model_bytes / assumed.disk_bytes_per_s
                ),
            ),
        ],
    )


def _failures(facts: Measured, assumed: Assumed) -> str:
    num_ranks = assumed.num_nodes * assumed.num_devices
    per_day = num_ranks / (assumed.years_between_failures * 365)
    away_s = RankOptions().rank_deadline_s + assumed.restart_s + facts.first_step_s

    def lost(stopped: int) -> str:
        return f"{100 * per_day * stopped * away_s / (num_ranks * _DAY_S):.2g} %"

    return _table(
        ["", "a job for each node", "one job over all nodes"],
        [
            ["failures a day", f"{per_day:.1f}", f"{per_day:.1f}"],
            ["ranks that one stops", f"{assumed.num_devices}", f"{num_ranks:,}"],
            ["for, at the longest (`rank_deadline_s`, restart, first step)", f"{away_s:.0f} s", f"{away_s:.0f} s"],
            ["of all capacity lost", lost(assumed.num_devices), lost(num_ranks)],
            ["processes at one rendezvous", f"{assumed.num_devices}", f"{num_ranks:,}"],
        ],
    )


_TABLES: dict[str, Callable[[Measured, Assumed], str]] = {
    "facts": _facts,
    "steps": _steps,
    "start": _start,
    "failures": _failures,
}


def _table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [list(heading), *map(list, rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])


def _reading(name: str) -> Any:
    return json.loads((_READINGS / f"{name}.json").read_bytes())


def _gb(nbytes: float) -> str:
    if nbytes >= 1e12:
        return f"{nbytes / 1e12:g} TB"
    return f"{nbytes / 1e9:,.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.3g} MB"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s"
