"""A trace as a picture: one row for each track, drawn by matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamflow.tools.trace.errors import PlottingUnavailableError
from streamflow.tools.trace.intervals import Stretch
from streamflow.tools.trace.lanes import CATEGORY_NAMES, Row, rows_of

COLOURS = {
    "block": "#3b6fd4",
    "wait": "#d64545",
    "copy": "#2a9d6f",
    "gather": "#c2459a",
    "pack": "#c98a1b",
    "pack_wait": "#e3b7a0",
    "work": "#8fbf6a",
    "fetch": "#7c5cc4",
    "slot": "#9cc3cf",
    "walk": "#8a94a6",
    "pass": "#cfd6e2",
    "allocation": "#9b6a4d",
}
#: Categories of spans that are mostly shorter than a pixel.
_SHORT = ("fetch", "allocation", "pack_wait", "work")
#: Inches: of a lane's height, and of the whole width.
LANE_INCHES, WIDTH_INCHES = 0.28, 14.0


def draw(trace: Mapping[str, Any], path: Path, title: str, between_s: Stretch | None) -> None:
    """Draw ``trace`` to ``path`` (PNG), all of it or what lies between two times in seconds.

    :raises PlottingUnavailableError: if matplotlib is not installed.
    :raises OSError: if the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as failure:
        raise PlottingUnavailableError from failure
    rows = [row for row in rows_of(trace) if row.lanes]
    num_lanes = sum(len(row.lanes) for row in rows)
    figure = Figure(figsize=(WIDTH_INCHES, 1.3 + LANE_INCHES * max(1, num_lanes)), layout="constrained")
    FigureCanvasAgg(figure)  # a figure of its own: pyplot would choose a backend for the whole process
    axes = figure.add_subplot()
    labels = _draw_rows(axes, rows)
    axes.set_yticks(list(labels), list(labels.values()))
    axes.set_ylim(num_lanes - 0.4, -0.6)
    axes.set_xlabel("seconds since the offload opened")
    axes.set_title(title, loc="left")
    axes.grid(axis="x", color="#dfe3e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if between_s is not None:
        axes.set_xlim(*between_s)
    used = {bar.category for row in rows for lane in row.lanes for bar in lane}
    handles = [Patch(color=COLOURS[c], label=name) for c, name in CATEGORY_NAMES.items() if c in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False)
    figure.savefig(path, dpi=110, format="png")


def _draw_rows(axes: Any, rows: Sequence[Row]) -> dict[float, str]:
    """Draw the bars; returns the rows' names by where they are."""
    labels: dict[float, str] = {}
    has_many = len({row.process for row in rows}) > 1
    y = 0
    for row in rows:
        labels[y] = f"{row.process}: {row.name}" if has_many else row.name
        for lane in row.lanes:
            _draw_lane(axes, lane, y)
            y += 1
    return labels


def _draw_lane(axes: Any, lane: Sequence[Any], y: int) -> None:
    by_category: dict[str, list[tuple[float, float]]] = {}
    for bar in lane:
        by_category.setdefault(bar.category, []).append((bar.begin_us / 1e6, bar.duration_us / 1e6))
    for category, stretches in by_category.items():
        colour = COLOURS[category]
        edge = colour if category in _SHORT else "white"  # white would hide what is shorter than the line is wide
        axes.broken_barh(stretches, (y - 0.42, 0.84), facecolor=colour, edgecolor=edge, linewidth=0.4)
