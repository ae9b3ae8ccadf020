"""A report for people, and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from streamflow.tools.terminal import format_bytes, format_seconds, format_share, plain_table
from streamflow.tools.trace.advice import advise
from streamflow.tools.trace.analysis import ComponentReport, WalkReport
from streamflow.tools.trace.causes import BLOCKED, CAUSES, Cause

#: What causes are called.
CAUSE_NAMES: dict[Cause | str, str] = {
    "transfer": "transfer (link busy)",
    "packing": "packing slower than the link",
    "slot": "slot not free",
    "loop": "event loop late",
    "on_demand": "on-demand fetch",
    "gather": "gathers (another rank late)",
    "walk": "waiting for a walk",
    "allocator": "allocator",
    "other": "waking threads",
    "outside": "work outside blocks",
    "compute": "compute",
}
#: Walks that are shown one by one.
MAX_WALKS = 12


def as_plain(reports: Sequence[ComponentReport], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The reports as one JSON object; times in seconds, sizes in bytes."""
    return {
        "num_dropped_events": metadata["num_dropped_events"],
        "components": [_plain(report, metadata) for report in reports],
    }


def _plain(report: ComponentReport, metadata: Mapping[str, Any]) -> dict[str, Any]:
    values = attrs.asdict(report)
    values["walks"] = [{**attrs.asdict(walk), "best_s": walk.best_s} for walk in report.walks]
    whole = report.sum_of("seconds")
    return {
        **values,
        "slowest_rank": report.slowest_rank,
        "seconds": whole,
        "seconds_by_cause": report.by_cause(),
        "link_utilisation": report.sum_of("link_busy_s") / whole if whole else 0.0,
        "best_s": report.sum_of("best_s"),
        "advice": [attrs.asdict(advice) for advice in advise(report, metadata)],
    }


def print_reports(reports: Sequence[ComponentReport], metadata: Mapping[str, Any], console: Console) -> None:
    """The reports as tables."""
    for report in reports:
        _print(report, metadata, console)
    dropped = metadata["num_dropped_events"]
    if dropped:
        needed = metadata["capacity_events"] + dropped
        console.print(
            f"The {dropped:,} oldest events are not in the trace; trace_events={needed:,} would have kept them."
        )


def _print(report: ComponentReport, metadata: Mapping[str, Any], console: Console) -> None:
    whole = report.sum_of("seconds")
    if not whole:
        console.print(Text(f"{report.title}: no block ran in the trace", style="bold"))
        return
    bound = CAUSE_NAMES[report.bound_by]
    console.print(Text(f"{report.title}: bound by {bound}", style="bold"))
    console.print(
        f"{_walks(len(report.walks))} in {format_seconds(whole)}; "
        f"best possible {format_seconds(report.sum_of('best_s'))} "
        f"(link {format_seconds(report.sum_of('link_limit_s'))} at {report.link_bytes_per_s / 1e9:.3g} GB/s, "
        f"compute {format_seconds(report.sum_of('compute_limit_s'))})"
    )
    _print_walks(report.walks, console)
    _print_causes(report, whole, console)
    if report.waited_by_rank:
        waits = sorted(report.waited_by_rank.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{format_seconds(seconds)} for rank {rank}" for rank, seconds in waits)
        console.print(f"Gathers waited {listed}, whether that held compute up or not")
    advice = advise(report, metadata)
    if advice:
        console.print(Text("What would help, at most", style="bold"))
    for each in advice:
        recovered = f"{100 * each.share:.0f} % of the time: " if each.seconds else ""
        console.print(Padding(Text(f"- {recovered}{each.text}"), (0, 0, 0, 1)))
    for problem in report.problems:
        console.print(Padding(Text(f"- {problem}", style="red"), (0, 0, 0, 1)))
    console.print()


def _walks(num: int) -> str:
    return f"{num} walk" if num == 1 else f"{num} walks"


def _print_walks(walks: Sequence[WalkReport], console: Console) -> None:
    table = plain_table(
        "walk",
        "passes",
        "time",
        "best",
        "x best",
        "streamed",
        "link busy",
        "compute",
        "overlap",
        "blocked",
        title="Walks",
    )
    for walk in walks[:MAX_WALKS]:
        table.add_row(
            str(walk.walk_id),
            str(walk.num_passes),
            format_seconds(walk.seconds),
            format_seconds(walk.best_s),
            f"{walk.seconds / walk.best_s:.2f}" if walk.best_s else "-",
            format_bytes(round(walk.streamed_bytes)),
            format_share(walk.link_busy_s, walk.seconds),
            format_share(walk.compute_s, walk.seconds),
            format_share(walk.overlap_s, min(walk.link_busy_s, walk.compute_s)),
            format_seconds(walk.blocked_s),
        )
    console.print(table)
    if len(walks) > MAX_WALKS:
        console.print(Text(f"and {_walks(len(walks) - MAX_WALKS)} more", style="dim"))


def _print_causes(report: ComponentReport, whole: float, console: Console) -> None:
    seconds = report.by_cause()
    table = plain_table("compute waited for", "time", "of the walks", title="Blocked time")
    for cause in sorted(CAUSES, key=lambda cause: (cause not in BLOCKED, -seconds[cause])):
        if seconds[cause] > 0:
            name = CAUSE_NAMES[cause] if cause in BLOCKED else f"({CAUSE_NAMES[cause]})"
            table.add_row(name, format_seconds(seconds[cause]), format_share(seconds[cause], whole))
    console.print(table)
