"""The Chrome trace of an offload: the events of all its engines, and the metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamflow.trace.engine import RecordedEngine
from streamflow.trace.ring import Entry
from streamflow.trace.schema import FIRST_PID, PIDS_PER_RANK, SCHEMA_VERSION, with_rank
from streamflow.trace.spans import ChromeEvent, SpanWriter

#: A trace as it is written.
TraceDocument = dict[str, Any]


def chrome_trace(
    entries: Sequence[Entry], engines: Sequence[RecordedEngine], zero_s: float, metadata: Mapping[str, Any], rank: int
) -> TraceDocument:
    """The trace of ``entries``, of ``rank``; times count from ``zero_s`` (of `time.perf_counter`)."""
    events: list[ChromeEvent] = []
    first_pid = FIRST_PID + PIDS_PER_RANK * rank
    num_unfinished = 0
    for engine in engines:
        pid = first_pid + engine.index
        writer = SpanWriter(pid, engine.labels, zero_s)
        writer.write(entry.record for entry in entries if entry.engine == engine.index)
        events += [*_process(pid, with_rank(", ".join(engine.components), rank, metadata)), *writer.events]
        num_unfinished += writer.num_unfinished
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    described = {
        "schema_version": SCHEMA_VERSION,
        **metadata,
        "num_unfinished_spans": num_unfinished,
        "engines": [_describe(engine, first_pid + engine.index, rank) for engine in engines],
    }
    return {"displayTimeUnit": "ms", "streamflow": described, "traceEvents": events}


def _process(pid: int, name: str) -> Iterator[ChromeEvent]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": f"streamflow {name}"}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid - FIRST_PID}}


def _describe(engine: RecordedEngine, pid: int, rank: int) -> dict[str, Any]:
    sizes = engine.sizes
    return {
        "pid": pid,
        "name": ", ".join(engine.components),
        "rank": rank,
        "blocks": [
            {"block": block, "component": component, "name": image.name, "nbytes": image.nbytes}
            for component, images in engine.components.items()
            for block, image in images.items()
        ],
        "window_bytes": 0 if sizes is None else sizes.window_bytes,
        "resident_bytes": 0 if sizes is None else sizes.resident_bytes,
        "staging_bytes": 0 if sizes is None else sizes.staging_bytes,
    }
