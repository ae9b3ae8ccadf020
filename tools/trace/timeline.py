"""A trace as typed values, in seconds from its zero. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from streamflow.tools.trace.intervals import Stretch, merged

Event = Mapping[str, Any]


@attrs.frozen
class Span:
    """A stretch of time and what was done in it."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def stretch(self) -> Stretch:
        return self.begin, self.end


@attrs.frozen
class Run(Span):
    """A block ran. ``entered`` and ``left`` are the host's times, where the device has times of its own."""

    place: int
    pass_id: int
    block: int
    fetch: int | None
    entered: float
    left: float


@attrs.frozen
class Copy(Span):
    """A copy over the host link, or a step on a copy stream (``nbytes`` 0)."""

    stream: str
    block: int | None
    fetch: int | None
    nbytes: int


@attrs.frozen
class Packed(Span):
    """A chunk was packed; ``nbytes`` 0: its thread waited for a buffer."""

    thread: str
    fetch: int | None
    nbytes: int


@attrs.frozen
class Gather(Span):
    """Ranks brought their slices together; this one waited ``waited`` seconds, from ``begin`` on, for ``last_rank``.

    None: not known, as the traces of all ranks were not merged.
    """

    block: int | None
    fetch: int | None
    waited: float | None
    last_rank: int | None

    @property
    def waiting(self) -> Stretch:
        """When it waited for another rank; where that is not known, when it may have."""
        return self.begin, self.end if self.waited is None else min(self.end, self.begin + self.waited)


@attrs.frozen
class Wait(Span):
    """A compute thread stood still."""

    place: int
    kind: str
    block: int | None


@attrs.frozen
class Pass(Span):
    """A forward call of the component."""

    place: int
    pass_id: int


@attrs.frozen
class Walk:
    """A walk over ``component`` and when each of its passes joined it, by pass."""

    walk_id: int
    component: str
    joined: dict[int, float]


@attrs.frozen
class Fetch:
    """A fetch as the loop decided it.

    ``asked``: when the message that brought it about was left (None: not known, or nothing was waiting for an answer).
    ``drops``: the block that gave the slot up. ``issued``: when passes were told (None: not in the trace).
    """

    fetch: int
    block: int
    slot: int
    nbytes: int
    on_demand: bool
    started: float
    issued: float | None
    asked: float | None
    drops: int | None


@attrs.frozen
class Timeline:
    """One engine's trace. Lists are in the order of their beginnings."""

    rank: int
    is_host: bool
    block_bytes: Mapping[int, int]
    components: Mapping[int, str]
    window_bytes: int
    runs: list[Run]
    copies: list[Copy]
    packed: list[Packed]
    gathers: list[Gather]
    waits: list[Wait]
    passes: list[Pass]
    walks: dict[int, Walk]
    fetches: dict[int, Fetch]
    answers: list[Stretch]
    retries: list[tuple[float, float]]
    problems: list[str]

    @property
    def link(self) -> list[Stretch]:
        """When the host link was busy."""
        return merged(copy.stretch for copy in self.copies if copy.nbytes)


#: How long after a message the fetch that it brings about begins, at most.
ANSWER_S = 0.005


def timelines(trace: Mapping[str, Any]) -> list[Timeline]:
    """The engines of a trace that `problems_of` found none in."""
    metadata = trace["streamflow"]
    is_host = bool(metadata["device"].get("is_host"))
    by_pid: dict[int, list[Event]] = {}
    for event in trace["traceEvents"]:
        by_pid.setdefault(event.get("pid", -1), []).append(event)
    return [_timeline(c, is_host, by_pid.get(c["pid"], [])) for c in metadata["engines"]]


def _timeline(engine: Mapping[str, Any], is_host: bool, events: list[Event]) -> Timeline:
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans: dict[str, list[Event]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda event: float(event["ts"])):
        spans.setdefault(event["cat"], []).append(event)
    instants = sorted((e for e in events if e["ph"] == "i"), key=lambda event: float(event["ts"]))
    waits = [
        Wait(*_ends(e), _place(names[e["tid"]]), e["args"]["kind"], e["args"]["block"]) for e in _of(spans, "wait")
    ]
    return Timeline(
        rank=engine["rank"],
        is_host=is_host,
        block_bytes={block["block"]: block["nbytes"] for block in engine["blocks"]},
        components={block["block"]: block["component"] for block in engine["blocks"]},
        window_bytes=engine["window_bytes"],
        runs=[_run(e, names) for e in _of(spans, "block")],
        copies=[_copy(e, names) for e in sorted([*_of(spans, "copy"), *_of(spans, "work")], key=_begin)],
        packed=[_packed(e, names) for e in sorted([*_of(spans, "pack"), *_of(spans, "pack_wait")], key=_begin)],
        gathers=[_gather(e) for e in _of(spans, "gather")],
        waits=waits,
        passes=[Pass(*_ends(e), _place(names[e["tid"]]), e["args"]["pass_id"]) for e in _of(spans, "pass")],
        walks=_walks(instants),
        fetches=_fetches(_of(spans, "slot"), instants, waits),
        answers=[(_s(e["args"]["rung_us"]), _begin(e)) for e in instants if e["args"].get("rung_us") is not None],
        retries=[(_begin(e), e["args"]["retries"]) for e in events if e["ph"] == "C" and e["name"] == RETRIES],
        problems=[_failure(e) for e in instants if "error" in e["args"]],
    )


#: The counter of the allocator's retries.
RETRIES = "allocator retries"


def _of(spans: Mapping[str, list[Event]], category: str) -> list[Event]:
    return spans.get(category, [])


def _s(us: float) -> float:
    return us / 1e6


def _begin(event: Event) -> float:
    return _s(event["ts"])


def _ends(event: Event) -> tuple[float, float]:
    return _s(event["ts"]), _s(event["ts"] + event["dur"])


def _place(track: str) -> int:
    return int(track.split()[1])


def _run(event: Event, names: Mapping[int, str]) -> Run:
    args = event["args"]
    where = _place(names[event["tid"]]), args["pass_id"], args["block"], args["fetch"]
    return Run(*_ends(event), *where, _s(args["entered_us"]), _s(args["left_us"]))


def _copy(event: Event, names: Mapping[int, str]) -> Copy:
    args = event["args"]
    return Copy(*_ends(event), names[event["tid"]], args["block"], args["fetch"], args.get("nbytes", 0))


def _packed(event: Event, names: Mapping[int, str]) -> Packed:
    return Packed(*_ends(event), names[event["tid"]], event["args"]["fetch"], event["args"].get("nbytes", 0))


def _gather(event: Event) -> Gather:
    args = event["args"]
    waited = None if args["waited_us"] is None else _s(args["waited_us"])
    return Gather(*_ends(event), args["block"], args["fetch"], waited, args["last_rank"])


def _walks(instants: Iterable[Event]) -> dict[int, Walk]:
    walks: dict[int, Walk] = {}
    for event in instants:
        args = event["args"]
        if event["name"] == "WalkStarted":
            walks[args["walk_id"]] = Walk(args["walk_id"], args["component"], {})
        if event["name"] in ("WalkStarted", "WalkJoined") and args["walk_id"] in walks:
            walks[args["walk_id"]].joined.update(dict.fromkeys(args["pass_ids"], _begin(event)))
    return walks


def _failure(event: Event) -> str:
    return f"{event['name']} at {_begin(event):.3f} s: {event['args']['error']}"


def _fetches(slots: Iterable[Event], instants: Iterable[Event], waits: Iterable[Wait]) -> dict[int, Fetch]:
    """The fetches, each with what the loop did just before and after it began it."""
    issued, drops, asked = _answers(instants, waits)
    return {
        e["args"]["fetch"]: Fetch(
            fetch=e["args"]["fetch"],
            block=e["args"]["block"],
            slot=e["args"]["slot"],
            nbytes=e["args"]["nbytes"],
            on_demand=e["args"]["on_demand"],
            started=_begin(e),
            issued=issued.get(e["args"]["fetch"]),
            asked=asked.get(e["args"]["fetch"]),
            drops=drops.get(e["args"]["fetch"]),
        )
        for e in slots
    }


def _answers(
    instants: Iterable[Event], waits: Iterable[Wait]
) -> tuple[dict[int, float], dict[int, int], dict[int, float]]:
    issued: dict[int, float] = {}
    drops: dict[int, int] = {}
    asked: dict[int, float] = {}
    freed: dict[int, int] = {}
    messages: dict[tuple[str, int | None], tuple[float, float]] = {}
    find_wait = _wait_finder(waits)
    for event in instants:
        kind, at, args = event["name"], _begin(event), event["args"]
        if kind == "BlockLeft" and args["rung_us"] is not None:
            messages[kind, args["block"]] = _s(args["rung_us"]), at
        elif kind == "BlockWanted":
            messages[kind, args["block"]] = find_wait(args["block"], at), at
        elif kind == "SlotFree":
            freed[args["slot"]] = args["block"]
        elif kind == "FetchStarted":
            fetch, dropped = args["fetch"], freed.pop(args["slot"], None)
            cause = ("BlockWanted", args["block"]) if args["on_demand"] else ("BlockLeft", dropped)
            rung, handled = messages.get(cause, (at, float("-inf")))
            if dropped is not None:
                drops[fetch] = dropped
            if at - handled <= ANSWER_S:
                asked[fetch] = rung
        elif kind == "FetchIssued":
            issued[args["fetch"]] = at
    return issued, drops, asked


def _wait_finder(waits: Iterable[Wait]) -> Callable[[int, float], float]:
    by_block: dict[int | None, list[Wait]] = {}
    for wait in waits:
        if wait.kind == "mailbox":
            by_block.setdefault(wait.block, []).append(wait)

    def find(block: int, at: float) -> float:
        """When the thread that asked for ``block`` did so, if the loop heard of it at ``at``."""
        return next((w.begin for w in by_block.get(block, ()) if w.begin <= at <= w.end + ANSWER_S), at)

    return find
