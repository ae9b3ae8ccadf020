"""What a trace tells: for each walk its bytes, limits, and where the time went. Pure: no torch, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from streamflow.tools.trace.causes import BLOCKED, CAUSES, Cause, Gap, find_gaps
from streamflow.tools.trace.intervals import Stretch, clipped, common, merged, total
from streamflow.tools.trace.timeline import Run, Timeline, timelines
from streamflow.trace.schema import with_rank

#: Compute that waits for less than this share of the time is not held up by streaming.
COMPUTE_BOUND_SHARE = 0.05
#: Copies below this many bytes say more about latency than about the link.
LEAST_COPY_BYTES = 1 << 16


@attrs.frozen
class WalkReport:
    """One walk. Seconds are wall time of the walk; ``seconds_by_cause`` are those of one of its places, in the mean.

    ``link_limit_s``: what its bytes take at the link's rate. ``compute_limit_s``: what blocks take, and in a walk of
    one place the work between them. ``best_s`` is the larger: no streaming of these bytes could be faster.
    """

    walk_id: int
    num_passes: int
    begin: float
    seconds: float
    streamed_bytes: float
    link_busy_s: float
    compute_s: float
    overlap_s: float
    seconds_by_cause: dict[Cause, float]
    link_limit_s: float
    compute_limit_s: float

    @property
    def best_s(self) -> float:
        return max(self.link_limit_s, self.compute_limit_s)

    @property
    def blocked_s(self) -> float:
        return sum(self.seconds_by_cause[cause] for cause in BLOCKED)


@attrs.frozen
class ComponentReport:
    """All walks of one component. ``bound_by``: the cause that took most, or ``compute``.

    ``title``: its name for people, with the rank if there are several.
    ``waited_by_rank``: seconds in which gathers here waited, by the rank that came last; only where that is known.
    """

    name: str
    title: str
    rank: int
    walks: list[WalkReport]
    bound_by: str
    link_bytes_per_s: float
    block_bytes: float
    num_on_demand: int
    worst_answer_s: float
    worst_answer_at: float
    waited_by_rank: dict[int, float]
    num_retries: int
    problems: list[str]

    @property
    def slowest_rank(self) -> int | None:
        """Whom gathers here waited for longest; None: nobody, or it is not known."""
        return max(self.waited_by_rank, key=self.waited_by_rank.__getitem__, default=None)

    def sum_of(self, name: str) -> float:
        """A field of the walks, added up."""
        return float(sum(getattr(walk, name) for walk in self.walks))

    def by_cause(self) -> dict[Cause, float]:
        """Seconds of all walks."""
        return {cause: sum(walk.seconds_by_cause[cause] for walk in self.walks) for cause in CAUSES}


def analyse(trace: Mapping[str, Any]) -> list[ComponentReport]:
    """A report on each component of a trace that `problems_of` found none in."""
    metadata = trace["streamflow"]
    return [report for timeline in timelines(trace) for report in _engine(timeline, metadata)]


def _engine(timeline: Timeline, metadata: Mapping[str, Any]) -> Iterator[ComponentReport]:
    gaps = find_gaps(timeline)
    for name in dict.fromkeys(timeline.components.values()):
        own = [gap for gap in gaps if timeline.components.get(gap.run.block) == name]
        yield _component(name, with_rank(name, timeline.rank, metadata), timeline, own)


def _component(name: str, title: str, timeline: Timeline, gaps: Sequence[Gap]) -> ComponentReport:
    rate = _link_rate(timeline)
    sizes = [nbytes for block, nbytes in timeline.block_bytes.items() if timeline.components[block] == name]
    walks = list(_walks(timeline, gaps, rate))
    worst = max(timeline.answers, key=lambda answer: answer[1] - answer[0], default=(0.0, 0.0))
    retries = [count for _, count in timeline.retries]
    return ComponentReport(
        name=name,
        title=title,
        rank=timeline.rank,
        walks=walks,
        bound_by=_bound_by(walks),
        link_bytes_per_s=rate,
        block_bytes=statistics.fmean(sizes) if sizes else 0.0,
        num_on_demand=sum(f.on_demand for f in timeline.fetches.values() if timeline.components[f.block] == name),
        worst_answer_s=worst[1] - worst[0],
        worst_answer_at=worst[1],
        waited_by_rank=_waited_by_rank(name, timeline),
        num_retries=int(max(retries) - min(retries)) if retries else 0,
        problems=timeline.problems,
    )


def _waited_by_rank(name: str, timeline: Timeline) -> dict[int, float]:
    seconds: dict[int, float] = {}
    for gather in timeline.gathers:
        # those at opening held no pass up
        if gather.fetch is None or gather.block is None or timeline.components.get(gather.block) != name:
            continue
        if gather.waited and gather.last_rank is not None:
            seconds[gather.last_rank] = seconds.get(gather.last_rank, 0.0) + gather.waited
    return seconds


def _bound_by(walks: Sequence[WalkReport]) -> str:
    seconds = {cause: sum(walk.seconds_by_cause[cause] for walk in walks) for cause in (*BLOCKED, "allocator")}
    whole = sum(walk.seconds for walk in walks)
    if not whole or sum(seconds.values()) < COMPUTE_BOUND_SHARE * whole:
        return "compute"
    return max(seconds, key=lambda cause: seconds[cause])


def _link_rate(timeline: Timeline) -> float:
    """Bytes per second while the link was busy; 0 if nothing was copied."""
    copies = [copy for copy in timeline.copies if copy.nbytes]
    copies = [copy for copy in copies if copy.nbytes >= LEAST_COPY_BYTES] or copies
    busy = total(merged(copy.stretch for copy in copies))
    return sum(copy.nbytes for copy in copies) / busy if busy else 0.0


def _walks(timeline: Timeline, gaps: Sequence[Gap], rate: float) -> Iterator[WalkReport]:
    walk_of = {pass_id: walk.walk_id for walk in timeline.walks.values() for pass_id in walk.joined}
    by_walk: dict[int, list[Gap]] = {}
    for gap in gaps:
        # a pass whose walk's beginning was dropped from the trace is a walk of its own
        by_walk.setdefault(walk_of.get(gap.run.pass_id, -gap.run.pass_id), []).append(gap)
    link, previous_end = timeline.link, float("-inf")
    for walk_id, own in sorted(by_walk.items(), key=lambda item: item[1][0].run.begin):
        begin = max(previous_end, min(gap.begin for gap in own))
        end = max([begin, *(gap.run.end for gap in own)])
        previous_end = end
        yield _walk(walk_id, own, (begin, end), link, timeline, rate)


def _walk(
    walk_id: int, gaps: Sequence[Gap], stretch: Stretch, link: Sequence[Stretch], timeline: Timeline, rate: float
) -> WalkReport:
    compute = merged(clipped((gap.run.stretch for gap in gaps), *stretch))
    busy = clipped(link, *stretch)
    nbytes = sum(copy.nbytes * _share(copy.stretch, stretch) for copy in timeline.copies)
    num_places = len({gap.run.place for gap in gaps})
    causes = {cause: seconds / num_places for cause, seconds in _by_cause(gaps, timeline).items()}
    between_s = causes["outside"] + causes["allocator"] if num_places == 1 else 0.0
    return WalkReport(
        walk_id=walk_id,
        num_passes=len({gap.run.pass_id for gap in gaps}),
        begin=stretch[0],
        seconds=stretch[1] - stretch[0],
        streamed_bytes=nbytes,
        link_busy_s=total(busy),
        compute_s=total(compute),
        overlap_s=total(common(busy, compute)),
        seconds_by_cause=causes,
        link_limit_s=nbytes / rate if rate else 0.0,
        compute_limit_s=total(compute) + between_s,
    )


def _share(part: Stretch, whole: Stretch) -> float:
    length = part[1] - part[0]
    return total(clipped([part], *whole)) / length if length else 0.0


def _by_cause(gaps: Sequence[Gap], timeline: Timeline) -> dict[Cause, float]:
    seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    for gap in gaps:
        for cause, took in gap.seconds.items():
            retried = cause == "outside" and _retried_in(gap.run, timeline)
            seconds["allocator" if retried else cause] += took
    return seconds


def _retried_in(run: Run, timeline: Timeline) -> bool:
    """Whether the allocator gave its cache back during the run's pass: that stalls the device between blocks."""
    own = next((each for each in timeline.passes if each.pass_id == run.pass_id), None)
    if own is None or not timeline.retries:
        return False
    before = [count for at, count in timeline.retries if at <= own.begin]
    during = [count for at, count in timeline.retries if own.begin < at <= own.end + 1e-3]
    return bool(during) and during[-1] > (before[-1] if before else timeline.retries[0][1])
