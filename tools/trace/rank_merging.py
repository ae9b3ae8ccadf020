"""One trace of those that the ranks of one run wrote, with who came last to each gather. Pure: no torch, no clock.

All ranks are on one node, so they have one clock: that of the wall, on which each trace says where its zero is. A rank
has come to a gather when its span begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from streamflow.tools.trace.errors import RankTracesError
from streamflow.trace.schema import FIRST_PID, MOMENTS, PIDS_PER_RANK

Trace = Mapping[str, Any]
#: Which gather: the engine it is of, and its number there.
GatherKey = tuple[int, int]


def merge_ranks(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """The traces, by the names of their files, in one; what differs in their metadata is the first one's.

    Gathers get ``waited_us`` and ``last_rank``, but for those that a trace of all ranks is not there for.

    :raises RankTracesError: if a trace is of one rank alone, of another run, or of a rank that is there already.
    """
    _check(traces)
    parts = list(traces.values())
    zero_ns = min(_zero_ns(trace) for trace in parts)
    events = [event for trace in parts for event in _shifted(trace, (_zero_ns(trace) - zero_ns) / 1e3)]
    engines = [engine for trace in parts for engine in trace["streamflow"]["engines"]]
    _fill(events, {engine["pid"]: engine["rank"] for engine in engines}, parts[0]["streamflow"]["ranks"]["size"])
    events.sort(key=lambda event: (event.get("ph") != "M", event.get("ts", 0.0)))
    metadata = {
        **parts[0]["streamflow"],
        "clock": {"unix_ns_at_zero": zero_ns},
        # of one rank: as many as the one that lacks most would have had to keep
        "num_dropped_events": max(trace["streamflow"]["num_dropped_events"] for trace in parts),
        "capacity_events": max(trace["streamflow"]["capacity_events"] for trace in parts),
        "num_unfinished_spans": sum(trace["streamflow"]["num_unfinished_spans"] for trace in parts),
        "engines": sorted(engines, key=lambda engine: int(engine["pid"])),
    }
    return {**parts[0], "streamflow": metadata, "traceEvents": events}


def last_to_come(arrivals: Mapping[int, float]) -> tuple[int, float]:
    """Of the moments at which each rank came, the last one and its rank: the lowest, of several at once."""
    at = max(arrivals.values())
    return min(rank for rank, came in arrivals.items() if came == at), at


def _check(traces: Mapping[str, Trace]) -> None:
    found: dict[int, str] = {}
    runs = {name: trace["streamflow"].get("ranks") for name, trace in traces.items()}
    first, wanted = next(iter(runs.items()))
    for name, run in runs.items():
        if run is None:
            raise RankTracesError(name, "it is of a run in which no ranks gathered")
        if run != wanted:
            raise RankTracesError(name, f"it is of another run than {first}")
        for rank in {engine["rank"] for engine in traces[name]["streamflow"]["engines"]}:
            if rank in found:
                raise RankTracesError(name, f"it is of rank {rank}, as is {found[rank]}")
            found[rank] = name


def _zero_ns(trace: Trace) -> int:
    return int(trace["streamflow"]["clock"]["unix_ns_at_zero"])


def _shifted(trace: Trace, by_us: float) -> Iterator[dict[str, Any]]:
    """The events, copied, each ``by_us`` later."""
    for event in trace["traceEvents"]:
        later = {"ts": round(event["ts"] + by_us, 3)} if "ts" in event else {}
        args = {**event.get("args", {})}
        args |= {name: round(args[name] + by_us, 3) for name in MOMENTS if args.get(name) is not None}
        yield {**event, **later, **({"args": args} if "args" in event else {})}


def _fill(events: list[dict[str, Any]], rank_of: Mapping[int, int], num_ranks: int) -> None:
    """Let gathers that all ranks came to say who was last."""
    gathers = [e for e in events if e.get("pid") in rank_of and (e["ph"], e.get("cat")) == ("X", "gather")]
    arrivals: dict[GatherKey, dict[int, float]] = {}
    for gather in gathers:
        arrivals.setdefault(_key(gather), {})[rank_of[gather["pid"]]] = gather["ts"]
    for gather in gathers:
        came = arrivals[_key(gather)]
        if len(came) == num_ranks:
            rank, at = last_to_come(came)
            gather["args"] |= {"last_rank": rank, "waited_us": round(at - gather["ts"], 3)}


def _key(gather: Mapping[str, Any]) -> GatherKey:
    return (gather["pid"] - FIRST_PID) % PIDS_PER_RANK, gather["args"]["number"]
