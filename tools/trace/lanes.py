"""Rows to draw: the tracks of a trace with their spans in lanes, so that those in one lane do not overlap. Pure: no
torch, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from streamflow.trace.schema import COUNTER, with_rank

#: Categories in the order in which legends show them.
CATEGORY_NAMES = {
    "block": "block runs",
    "wait": "thread waits",
    "copy": "copy",
    "gather": "gather",
    "pack": "packing",
    "pack_wait": "buffer not free",
    "work": "other step",
    "fetch": "fetch begun",
    "slot": "slot in use",
    "walk": "walk",
    "pass": "pass",
    "allocation": "allocation",
}


@attrs.frozen
class Bar:
    """A span to draw; times in microseconds."""

    category: str
    name: str
    begin_us: float
    duration_us: float
    args: Mapping[str, Any]


@attrs.frozen
class Row:
    """A track: lanes of spans, or the points of a counter (time, value)."""

    process: str
    name: str
    lanes: Sequence[Sequence[Bar]] = ()
    points: Sequence[tuple[float, float]] = ()


def rows_of(trace: Mapping[str, Any]) -> list[Row]:
    """The rows of all engines, as they are to be drawn from top to bottom."""
    rows: list[Row] = []
    for engine in trace["streamflow"]["engines"]:
        events = [event for event in trace["traceEvents"] if event.get("pid") == engine["pid"]]
        process = with_rank(engine["name"], engine["rank"], trace["streamflow"])
        rows += _tracks(process, events)
        rows += _counters(process, events)
    return rows


def end_of(rows: Iterable[Row]) -> float:
    """When the last span ends, in microseconds; 1 if there is none."""
    bars = (bar for row in rows for lane in row.lanes for bar in lane)
    return max((bar.begin_us + bar.duration_us for bar in bars), default=1.0)


def _tracks(process: str, events: Sequence[Mapping[str, Any]]) -> list[Row]:
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans: dict[int, list[Bar]] = {}
    for e in events:
        if e["ph"] == "X":
            spans.setdefault(e["tid"], []).append(Bar(e["cat"], e["name"], e["ts"], e["dur"], e["args"]))
    return [Row(process, names[tid], _lanes(spans[tid])) for tid in sorted(spans)]


def _lanes(bars: Iterable[Bar]) -> list[list[Bar]]:
    lanes: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.begin_us, -bar.duration_us)):
        free = (lane for lane in lanes if lane[-1].begin_us + lane[-1].duration_us <= bar.begin_us)
        lane = next(free, None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(bar)
    return lanes


def _counters(process: str, events: Sequence[Mapping[str, Any]]) -> list[Row]:
    points: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "C" and event["cat"] == COUNTER:
            for key, value in event["args"].items():
                name = f"{event['name']}: {key}" if len(event["args"]) > 1 else event["name"]
                points.setdefault(name, []).append((event["ts"], value))
    return [Row(process, name, points=found) for name, found in points.items() if any(value for _, value in found)]
