"""Why a block began later than the one before it ended. Pure: no torch, no clock.

Before each block its place stood still for some time. Of that, what came after the block's weights were there is work
outside the blocks (or the thread that issues it). The rest is blocked time, and it is shared out like this:

- before its walk began, the pass waited for that;
- a fetch that nothing had foreseen: all of it is on demand, but for the time the loop took to hear of it;
- ranks: the time this one waited for another, while none of the block's own bytes were on the link. How long that was
  is known where the traces of all ranks were merged; elsewhere it is the time of the gather;
- the loop told of a copy only after it was done: the loop was late;
- the link stood idle since compute last waited, though this fetch was still to come: had it not, the block would have
  begun earlier by as much. That part has the cause of the idleness: the slot was still in use, the loop was late, or
  packing was slower than the link;
- what remains is transfer: the link was busy all the time, and that was not enough.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import attrs

from streamflow.tools.trace.intervals import Stretch, clipped, common, merged, total, without
from streamflow.tools.trace.timeline import Copy, Fetch, Gather, Packed, Run, Span, Timeline

Cause = Literal["transfer", "packing", "slot", "loop", "on_demand", "gather", "walk", "allocator", "other", "outside"]
#: Causes in which compute waited for weights. ``outside`` is time that streaming does not explain.
CAUSES: tuple[Cause, ...] = get_args(Cause)
BLOCKED: tuple[Cause, ...] = tuple(cause for cause in CAUSES if cause not in ("outside", "allocator"))


@attrs.frozen
class Gap:
    """The time before one run in which its place stood still, in seconds by cause."""

    run: Run
    begin: float
    end: float
    seconds: dict[Cause, float]

    @property
    def blocked(self) -> float:
        """Seconds in which compute waited for weights."""
        return sum(seconds for cause, seconds in self.seconds.items() if cause in BLOCKED)


def find_gaps(timeline: Timeline) -> list[Gap]:
    """The gap before every run, in the order in which they end."""
    finder = _GapFinder(timeline)
    return [finder.gap_before(run, begin, pass_begin) for run, begin, pass_begin in _with_begins(timeline)]


def _with_begins(timeline: Timeline) -> Iterator[tuple[Run, float, float]]:
    """Runs by their begin, with when their place was done with the run before, and when their pass began."""
    begun = {each.pass_id: each.begin for each in timeline.passes}
    last_end: dict[int, float] = {}
    for run in sorted(timeline.runs, key=lambda run: run.begin):
        pass_begin = begun.get(run.pass_id, run.begin)
        begin = max(pass_begin, last_end.get(run.place, pass_begin))
        yield run, min(begin, run.begin), pass_begin
        last_end[run.place] = run.end


class _GapFinder:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._copies: dict[int, list[Copy]] = {}
        for copy in timeline.copies:
            if copy.fetch is not None:
                self._copies.setdefault(copy.fetch, []).append(copy)
        self._gathers: dict[int | None, list[Gather]] = {}
        for gather in timeline.gathers:
            self._gathers.setdefault(gather.fetch, []).append(gather)
        self._packed: dict[int | None, list[Packed]] = {}
        for packed in timeline.packed:
            self._packed.setdefault(packed.fetch, []).append(packed)
        self._link = sorted((copy for copy in timeline.copies if copy.nbytes), key=lambda copy: copy.begin)
        self._link_begins = [copy.begin for copy in self._link]
        self._ends_of_block: dict[int, list[float]] = {}
        for run in timeline.runs:
            self._ends_of_block.setdefault(run.block, []).append(run.end)
        self._joined = {pass_id: at for walk in timeline.walks.values() for pass_id, at in walk.joined.items()}
        self._last_blocked_end = float("-inf")

    def gap_before(self, run: Run, begin: float, pass_begin: float) -> Gap:
        """The gap from ``begin`` to the run, and its causes. Runs must come in the order of their begins."""
        seconds: dict[Cause, float] = {}
        fetch = None if run.fetch is None else self._timeline.fetches.get(run.fetch)
        blocked = [] if fetch is None else self._blocked(run, fetch, begin)
        if fetch is not None and blocked:
            seconds = self._share_out(run, fetch, blocked, pass_begin)
            self._last_blocked_end = max(self._last_blocked_end, blocked[-1][1])
        stood_still = run.begin - begin
        seconds["outside"] = max(0.0, stood_still - total(blocked))
        return Gap(run, begin, run.begin, {cause: s for cause, s in seconds.items() if s > 0})

    def _ready(self, fetch: Fetch) -> float:
        """When a block could run: its bytes are there, and its pass could be told."""
        spans: list[Span] = [*self._copies.get(fetch.fetch, ()), *self._gathers.get(fetch.fetch, ())]
        return max([*(span.end for span in spans), fetch.issued or fetch.started])

    def _blocked(self, run: Run, fetch: Fetch, begin: float) -> list[Stretch]:
        if not self._timeline.is_host:
            return merged(clipped([(begin, self._ready(fetch))], begin, run.begin))
        # the thread computes itself: it is blocked when it says so
        waits = [w for w in self._timeline.waits if w.place == run.place and w.block == run.block]
        return merged(clipped((w.stretch for w in waits if w.kind in ("mailbox", "event")), begin, run.begin))

    def _share_out(self, run: Run, fetch: Fetch, blocked: Sequence[Stretch], pass_begin: float) -> dict[Cause, float]:
        seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        rest = total(blocked)

        def take(cause: Cause, most: float) -> None:
            nonlocal rest
            taken = max(0.0, min(rest, most))
            seconds[cause] += taken
            rest -= taken

        take("walk", total(clipped(blocked, pass_begin, self._joined.get(run.pass_id, pass_begin))))
        if fetch.on_demand:
            if fetch.asked is not None:
                take("loop", total(clipped([(fetch.asked, fetch.started)], blocked[0][0], blocked[-1][1])))
            take("on_demand", rest)
            return seconds
        take("gather", self._waited_for_ranks(fetch, blocked))
        copied = max((copy.end for copy in self._copies.get(fetch.fetch, ())), default=fetch.started)
        if fetch.issued is not None:
            take("loop", total(clipped(blocked, copied, fetch.issued)))
        ready = self._ready(fetch)
        take("other", total(clipped(blocked, ready, blocked[-1][1])))  # the thread's own waking
        for cause, idle_s in self._idle(fetch, max(self._last_blocked_end, pass_begin)):
            take(cause, idle_s)
        take("transfer", rest)
        return seconds

    def _waited_for_ranks(self, fetch: Fetch, blocked: Sequence[Stretch]) -> float:
        copying = merged(copy.stretch for copy in self._copies.get(fetch.fetch, ()))
        waiting = merged(gather.waiting for gather in self._gathers.get(fetch.fetch, ()))
        return total(common(blocked, [part for stretch in waiting for part in without(stretch, copying)]))

    def _idle(self, fetch: Fetch, since: float) -> Iterator[tuple[Cause, float]]:
        """What the link was idle for until the fetch's last copy began, latest first."""
        own = [copy for copy in self._copies.get(fetch.fetch, ()) if copy.nbytes]
        if not own:
            return
        last = bisect.bisect_right(self._link_begins, own[-1].begin) - 1
        for index in range(last, -1, -1):
            copy = self._link[index]
            before = self._link[index - 1].end if index else float("-inf")
            idle = (max(before, since), copy.begin)
            if idle[1] > idle[0]:
                yield from self._why_idle(idle, copy)
            if before <= since:
                return

    def _why_idle(self, idle: Stretch, copy: Copy) -> Iterator[tuple[Cause, float]]:
        fetch = None if copy.fetch is None else self._timeline.fetches.get(copy.fetch)
        if fetch is None:
            yield "other", idle[1] - idle[0]
            return
        for cause, stretches in self._stages(fetch, idle):
            yield cause, total(stretches)

    def _stages(self, fetch: Fetch, idle: Stretch) -> Iterator[tuple[Cause, list[Stretch]]]:
        """The idle stretch before a copy of ``fetch``, from its end to its begin."""
        asked = fetch.started if fetch.asked is None else fetch.asked
        slot_free = max(asked, self._last_use(fetch))
        packing = merged(p.stretch for p in self._packed.get(fetch.fetch, ()))
        begun = max(fetch.started, slot_free)
        late = clipped([idle], begun, float("inf"))
        for stretch in late:
            not_packing = without(stretch, packing)
            yield "packing", without(stretch, not_packing)
            yield "other", not_packing
        yield "slot", clipped([idle], fetch.started, slot_free)  # the device was behind the host
        yield "loop", clipped([idle], asked, fetch.started)
        yield ("slot" if fetch.drops is not None else "other"), clipped([idle], float("-inf"), asked)

    def _last_use(self, fetch: Fetch) -> float:
        """When the device was done with the block that gave its slot to ``fetch``; long ago, if it is not known."""
        if fetch.drops is None or self._timeline.is_host:
            return float("-inf")
        ends = self._ends_of_block.get(fetch.drops, [])
        first_copy = next((copy.begin for copy in self._copies.get(fetch.fetch, ())), fetch.started)
        index = bisect.bisect_right(ends, first_copy + 1e-4)
        return ends[index - 1] if index else float("-inf")
