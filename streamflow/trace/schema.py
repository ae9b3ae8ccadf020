"""The schema of trace files, version 2, and its validator; docs/trace-schema.md says what each field means. Pure: no
torch, no clock.

A trace is a Chrome trace (a JSON object with ``traceEvents``) whose own events carry a category of `SPANS` or `INSTANT`
and the arguments listed there; the object's ``streamflow`` holds the metadata. Events of other categories may be mixed
in, from a profiler for example: they are not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SCHEMA_VERSION = 2
#: The first process id of ours: one for each engine, far above those of real processes.
FIRST_PID = 10_000_000
#: Each rank's process ids begin this much after the previous one's.
PIDS_PER_RANK = 1000

_INT, _INT_OR_NONE, _NUMBER = (int,), (int, type(None)), (int, float)
_NUMBER_OR_NONE, _STR, _BOOL, _INTS = (int, float, type(None)), (str,), (bool,), (list,)

#: Arguments of spans (phase X), by category. Times are in microseconds, sizes in bytes.
SPANS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "block": {"block": _INT, "pass_id": _INT, "fetch": _INT_OR_NONE, "entered_us": _NUMBER, "left_us": _NUMBER},
    "wait": {"kind": _STR, "block": _INT_OR_NONE},
    "pass": {"pass_id": _INT},
    "walk": {"walk_id": _INT, "component": _STR, "pass_ids": _INTS},
    "fetch": {"block": _INT_OR_NONE, "fetch": _INT_OR_NONE},
    "copy": {"block": _INT_OR_NONE, "fetch": _INT_OR_NONE, "nbytes": _INT},
    "work": {"block": _INT_OR_NONE, "fetch": _INT_OR_NONE},
    "pack": {"block": _INT_OR_NONE, "fetch": _INT_OR_NONE, "nbytes": _INT},
    "pack_wait": {"block": _INT_OR_NONE, "fetch": _INT_OR_NONE},
    "gather": {
        "block": _INT_OR_NONE,
        "fetch": _INT_OR_NONE,
        "number": _INT,
        "nbytes": _INT,
        "waited_us": _NUMBER_OR_NONE,
        "last_rank": _INT_OR_NONE,
    },
    "slot": {
        "slot": _INT,
        "block": _INT,
        "generation": _INT,
        "fetch": _INT,
        "nbytes": _INT,
        "on_demand": _BOOL,
        "open": _BOOL,
    },
    "allocation": {"nbytes": _INT},
}
#: Arguments that are moments on the trace's time axis, as ``ts`` is; other times are lengths.
MOMENTS = ("entered_us", "left_us", "rung_us")
#: Category of instants (phase i): what the loop published. ``rung_us``: when the message for it was left.
INSTANT = "event"
INSTANT_ARGS: Mapping[str, tuple[type, ...]] = {"fetch": _INT_OR_NONE, "rung_us": _NUMBER_OR_NONE}
#: Category of counters (phase C) and of flows (phases s, t, f).
COUNTER, FLOW = "counter", "flow"
#: What the metadata must hold.
METADATA: Mapping[str, tuple[type, ...]] = {
    "schema_version": _INT,
    "clock": (dict,),
    "num_dropped_events": _INT,
    "num_unfinished_spans": _INT,
    "capacity_events": _INT,
    "versions": (dict,),
    "config": (dict,),
    "device": (dict,),
    "engines": _INTS,
}
ENGINE: Mapping[str, tuple[type, ...]] = {
    "pid": _INT,
    "name": _STR,
    "rank": _INT,
    "blocks": _INTS,
    "resident_bytes": _INT,
    "window_bytes": _INT,
}
#: What the metadata's ``ranks`` holds, where several ranks gather.
RANKS: Mapping[str, tuple[type, ...]] = {"size": _INT, "run": _STR}


def with_rank(name: str, rank: int, metadata: Mapping[str, Any]) -> str:
    """``name``, with the rank where there are several."""
    return f"{name}, rank {rank}" if "ranks" in metadata else name


def problems_of(trace: Mapping[str, Any]) -> list[str]:
    """What keeps ``trace`` from being one of this schema; empty if nothing does."""
    events, metadata = trace.get("traceEvents"), trace.get("streamflow")
    if not isinstance(events, list):
        return ["it has no list traceEvents"]
    if not isinstance(metadata, dict):
        return ["it has no object streamflow, so it is no trace that streamflow wrote"]
    version = metadata.get("schema_version")
    if version != SCHEMA_VERSION:
        return [f"its schema version is {version!r} and only {SCHEMA_VERSION} is known"]
    found = list(_metadata_problems(metadata))
    pids = {engine.get("pid") for engine in metadata.get("engines", ()) if isinstance(engine, dict)}
    for index, event in enumerate(events):
        if isinstance(event, dict) and event.get("pid") in pids:
            found += [f"event {index}: {problem}" for problem in _event_problems(event)]
    ours = [event for event in events if isinstance(event, dict) and event.get("pid") in pids]
    return [*found, *_flow_problems(ours), *_track_problems(ours)]


def _metadata_problems(metadata: Mapping[str, Any]) -> Iterator[str]:
    yield from _wrong_fields(metadata, METADATA, "streamflow")
    clock = metadata.get("clock")
    if isinstance(clock, dict):
        yield from _wrong_fields(clock, {"unix_ns_at_zero": _INT}, "streamflow.clock")
    if "ranks" in metadata:
        ranks = metadata["ranks"]
        yield from _wrong_fields(ranks if isinstance(ranks, dict) else {}, RANKS, "streamflow.ranks")
    for engine in metadata.get("engines") or ():
        if isinstance(engine, dict):
            yield from _wrong_fields(engine, ENGINE, "an engine")
        else:
            yield f"an engine is {engine!r}"


def _wrong_fields(found: Mapping[str, Any], wanted: Mapping[str, tuple[type, ...]], where: str) -> Iterator[str]:
    for name, types in wanted.items():
        if name not in found:
            yield f"{where} lacks {name}"
        elif not isinstance(found[name], types) or (isinstance(found[name], bool) and bool not in types):
            yield f"{where} has {name}={found[name]!r}"


def _event_problems(event: Mapping[str, Any]) -> Iterator[str]:
    phase, category = event.get("ph"), str(event.get("cat"))
    if phase == "M":
        return
    yield from _wrong_fields(event, {"name": _STR, "tid": _INT, "ts": _NUMBER}, "it")
    if phase == "X" and category in SPANS:
        yield from _wrong_fields(event, {"dur": _NUMBER, "args": (dict,)}, f"the {category}")
        yield from _wrong_fields(event.get("args") or {}, SPANS[category], f"the {category}")
        if event.get("dur", 0) < 0:
            yield f"the {category} ends before it begins"
    elif phase == "i" and category == INSTANT:
        yield from _wrong_fields(event.get("args") or {}, INSTANT_ARGS, f"the event {event.get('name')}")
    elif (phase, category) != ("C", COUNTER) and not (phase in ("s", "t", "f") and category == FLOW):
        yield f"phase {phase!r} with category {category!r} is none of this schema"


def _flow_problems(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    starts = Counter((e["pid"], e.get("id")) for e in events if e.get("ph") == "s")
    yield from (f"flow {flow} begins {count} times" for flow, count in starts.items() if count > 1)
    ends = {(e["pid"], e.get("id")) for e in events if e.get("ph") in ("t", "f")}
    yield from (f"flow {flow} has no beginning" for flow in sorted(ends - starts.keys(), key=str))


def _track_problems(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Every track has a name, and its spans lie inside each other or apart."""
    named = {(e["pid"], e.get("tid")) for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"}
    tracks: dict[tuple[Any, Any], list[tuple[float, float, str]]] = {}
    for event in events:
        if event.get("ph") == "X" and isinstance(event.get("dur"), (int, float)):
            begin = float(event.get("ts", 0))
            tracks.setdefault((event["pid"], event.get("tid")), []).append((begin, begin + event["dur"], event["name"]))
    yield from (f"track {track} has no name" for track in sorted(tracks.keys() - named, key=str))
    for track, spans in tracks.items():
        yield from _overlaps(track, spans)


def _overlaps(track: tuple[Any, Any], spans: list[tuple[float, float, str]]) -> Iterator[str]:
    open_until: list[tuple[float, str]] = []
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1][0] <= begin + TOLERANCE_US:
            open_until.pop()
        if open_until and end > open_until[-1][0] + TOLERANCE_US:
            yield f"on track {track}, {name!r} at {begin} us overlaps {open_until[-1][1]!r}"
        open_until.append((end, name))


#: Spans of a device's stream may seem to overlap by the resolution of its clock.
TOLERANCE_US = 5.0
