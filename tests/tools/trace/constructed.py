"""Traces put together by hand: gathered walks on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamflow.trace.schema import FIRST_PID, PIDS_PER_RANK, SCHEMA_VERSION, problems_of

NBYTES = 1_000_000
COMPUTE_US = 10_000.0
TRANSFER_US = 20_000.0
LATE_US = 30_000.0


def document(
    events: list[dict[str, Any]], num_blocks: int, rank: int = 0, zero_ns: int = 1_700_000_000_000_000_000, **facts: Any
) -> dict[str, Any]:
    """A trace of one component with these events, those of ``rank``; it is of the schema.

    ``zero_ns``: the wall clock at its time zero. ``facts``: more metadata.
    """
    pid = FIRST_PID + PIDS_PER_RANK * rank
    blocks = [
        {"block": block, "component": "Model", "name": f"blocks.{block}", "nbytes": NBYTES}
        for block in range(num_blocks)
    ]
    engine = {
        "pid": pid,
        "name": "Model",
        "rank": rank,
        "blocks": blocks,
        "window_bytes": 2 * NBYTES,
        "resident_bytes": 0,
    }
    metadata = {
        "schema_version": SCHEMA_VERSION,
        "clock": {"unix_ns_at_zero": zero_ns},
        "num_dropped_events": 0,
        "num_unfinished_spans": 0,
        "capacity_events": 1000,
        "versions": {},
        "config": {"window_blocks": 2},
        "device": {"name": "cuda:0", "is_host": False},
        "engines": [engine],
        **facts,
    }
    named = [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in TRACKS.items()
    ]
    trace = {"streamflow": metadata, "traceEvents": [*named, *({**event, "pid": pid} for event in events)]}
    assert problems_of(trace) == []
    return trace


TRACKS = {
    10: "place 0",
    100: "place 0 thread",
    200: "event loop",
    300: "copy stream",
    301: "gather stream",
    500: "slot 0",
}


def span(tid: int, category: str, begin_us: float, end_us: float, **args: Any) -> dict[str, Any]:
    event = {"ph": "X", "pid": FIRST_PID, "tid": tid, "cat": category, "name": category, "ts": begin_us}
    return {**event, "dur": end_us - begin_us, "args": args}


def instant(name: str, at_us: float, **args: Any) -> dict[str, Any]:
    args = {"fetch": None, "rung_us": None, **args}
    return {"ph": "i", "s": "t", "pid": FIRST_PID, "tid": 200, "cat": "event", "name": name, "ts": at_us, "args": args}


def slow_rank(
    num_blocks: int, waits_for: int | None, outside_s: float = 0.0, retries: Sequence[int] = ()
) -> dict[str, Any]:
    """One walk in which each block's slice is copied, and then gathered.

    With ``waits_for``, every gather but the first waits `LATE_US` for that rank. ``outside_s`` passes before each block
    is issued; ``retries`` are the allocator's, before and after the walk.
    """
    outside_us = outside_s * 1e6
    events = [instant("WalkStarted", 0.0, walk_id=1, component="Model", pass_ids=[7])]
    copied = gathered = ran = 0.0
    for block in range(num_blocks):
        late = LATE_US if waits_for is not None and block else 0.0
        fetch = {"block": block, "fetch": block + 1, "nbytes": NBYTES}
        begin, copied = copied, copied + TRANSFER_US
        events.append(span(300, "copy", begin, copied, **fetch))
        events.append(
            span(500, "slot", begin, copied + late, slot=0, generation=block, on_demand=False, open=False, **fetch)
        )
        arrived, gathered = max(copied, gathered), max(copied, gathered) + late
        copied = gathered  # the next slice goes into the buffer that this one left
        last = {"number": block, "waited_us": late, "last_rank": waits_for or 0}
        events.append(span(301, "gather", arrived, gathered, **fetch, **last))
        start = max(ran, gathered) + outside_us
        ran = start + COMPUTE_US
        run = {"pass_id": 7, "fetch": block + 1, "block": block, "entered_us": start, "left_us": ran}
        events.append(span(10, "block", start, ran, **run))
    events.append(span(100, "pass", 0.0, ran, pass_id=7))
    for at_us, count in zip((0.0, ran), retries, strict=bool(retries)):
        counter = {"ph": "C", "pid": FIRST_PID, "tid": 0, "cat": "counter", "name": "allocator retries", "ts": at_us}
        events.append({**counter, "args": {"retries": count}})
    return document(events, num_blocks)
