"""A trace as one HTML page that needs no network: the data, and the script that draws it, are inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from streamflow.tools.terminal import format_bytes, format_seconds
from streamflow.tools.trace.analysis import ComponentReport, analyse
from streamflow.tools.trace.causes import CAUSES
from streamflow.tools.trace.lanes import CATEGORY_NAMES, Bar, Row, end_of, rows_of
from streamflow.tools.trace.report import CAUSE_NAMES

#: Which category's colour a cause has.
_CAUSE_COLOURS = {
    "transfer": "copy",
    "packing": "pack",
    "slot": "slot",
    "loop": "fetch",
    "on_demand": "wait",
    "gather": "gather",
    "allocator": "allocation",
    "walk": "walk",
    "other": "pack_wait",
    "outside": "pass",
}


def page(trace: Mapping[str, Any], title: str) -> str:
    """The page of a trace that `problems_of` found none in."""
    rows, metadata = rows_of(trace), trace["streamflow"]
    used = {bar.category for row in rows for lane in row.lanes for bar in lane}
    data = {
        "title": title,
        "facts": _facts(metadata),
        "end_us": end_of(rows),
        "components": [_component(report) for report in analyse(trace)],
        "categories": [{"category": c, "name": name} for c, name in CATEGORY_NAMES.items() if c in used],
        "tracks": [_track(row, len(metadata["engines"]) > 1) for row in rows],
    }
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # inside a script element only this could end it
    return template.replace("@DATA@", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))


def _facts(metadata: Mapping[str, Any]) -> str:
    versions, device = metadata["versions"], metadata["device"]
    facts = [f"{device['name']} ({device.get('model', '')})", f"torch {versions.get('torch')}"]
    facts += [f"window of {metadata['config'].get('window_blocks')} blocks"]
    if "transfer" in metadata:
        facts.append(f"{metadata['transfer']['transfer']} transfer from the {metadata['transfer']['source']}")
    if metadata["num_dropped_events"]:
        facts.append(f"{metadata['num_dropped_events']:,} older events dropped")
    return " · ".join(facts)


def _component(report: ComponentReport) -> dict[str, Any]:
    whole, seconds = report.sum_of("seconds"), report.by_cause()
    text = f"bound by {CAUSE_NAMES[report.bound_by]}, {len(report.walks)} walks in {format_seconds(whole)}"
    best = f"{text}; best possible {format_seconds(report.sum_of('best_s'))}"
    shares = [{"name": "blocks run", "color": "block", "share": report.sum_of("compute_s") / whole if whole else 0.0}]
    for cause in CAUSES:
        if seconds[cause] > 0 and whole:
            shares.append({"name": CAUSE_NAMES[cause], "color": _CAUSE_COLOURS[cause], "share": seconds[cause] / whole})
    return {"name": report.title, "text": best, "shares": shares}


def _track(row: Row, many: bool) -> dict[str, Any]:
    name = f"{row.process}: {row.name}" if many else row.name
    if not row.lanes:
        most = max((value for _, value in row.points), default=0.0)
        return {
            "name": name,
            "process": row.process,
            "points": row.points,
            "most": most,
            "most_text": format_bytes(round(most)) if "(bytes)" in row.name else f"{most:,.4g}",
        }
    return {"name": name, "process": row.process, "lanes": [[_bar(bar) for bar in lane] for lane in row.lanes]}


def _bar(bar: Bar) -> dict[str, Any]:
    return {
        "c": bar.category,
        "n": bar.name,
        "t": round(bar.begin_us, 1),
        "d": round(bar.duration_us, 1),
        "f": bar.args.get("fetch"),
        "a": {name: _plain(value) for name, value in bar.args.items() if not name.endswith("_us")},
    }


def _plain(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
