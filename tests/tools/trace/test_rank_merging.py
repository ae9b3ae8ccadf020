"""The traces of ranks in one: every gather that all came to knows who came last, and how long it waited."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from streamflow.tools.trace.analysis import analyse
from streamflow.tools.trace.errors import RankTracesError
from streamflow.tools.trace.rank_merging import last_to_come, merge_ranks
from streamflow.trace.schema import problems_of
from tests.tools.trace.constructed import document, instant, span

ZERO_NS = 1_700_000_000_000_000_000
Trace = dict[str, Any]


@attrs.frozen
class Run:
    """What ranks did, in microseconds on one clock: when their traces begin, and when each came to each gather.

    ``dropped``: how many of the first gathers are not in a rank's trace.
    """

    zeros: list[int]
    delays: list[list[int]]
    dropped: list[int]

    def came(self, number: int) -> list[int]:
        """When each rank came to a gather: some time after the one before it, which ends for all at once."""
        before = 1000 if not number else max(self.came(number - 1)) + 5
        return [before + delay for delay in self.delays[number]]

    def traces(self) -> dict[str, Trace]:
        return {f"trace-{rank}.json": self.trace(rank) for rank in range(len(self.zeros))}

    def trace(self, rank: int) -> Trace:
        zero, events = self.zeros[rank], []
        for number in range(self.dropped[rank], len(self.delays)):
            came = self.came(number)
            unknown = {"waited_us": None, "last_rank": None}
            where = {"block": 0, "fetch": 1 + number, "number": number, "nbytes": 7, **unknown}
            events.append(span(301, "gather", came[rank] - zero, max(came) + 5 - zero, **where))
        events.append(instant("BlockLeft", 900.0 - zero, block=0, pass_id=1, rung_us=800.0 - zero))
        facts = {"num_dropped_events": self.dropped[rank], "ranks": {"size": len(self.zeros), "run": "a"}}
        return document(events, 1, rank, ZERO_NS + 1000 * zero, **facts)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    size, num_gathers = draw(st.integers(2, 4)), draw(st.integers(0, 5))
    delays = st.lists(st.integers(0, 100), min_size=size, max_size=size)
    return Run(
        zeros=draw(st.lists(st.integers(0, 500), min_size=size, max_size=size)),
        delays=draw(st.lists(delays, min_size=num_gathers, max_size=num_gathers)),
        dropped=draw(st.lists(st.integers(0, num_gathers), min_size=size, max_size=size)),
    )


def gathers(trace: Trace) -> dict[tuple[int, int], Trace]:
    """By the engine's process and the gather's number."""
    return {(e["pid"], e["args"]["number"]): e for e in trace["traceEvents"] if e.get("cat") == "gather"}


@hypothesis.given(runs())
def test_all_that_every_rank_has_is_known_and_nothing_else(run: Run) -> None:
    merged = merge_ranks(run.traces())
    assert problems_of(merged) == []
    assert len(gathers(merged)) == sum(len(run.delays) - dropped for dropped in run.dropped)
    rank_of = {engine["pid"]: engine["rank"] for engine in merged["streamflow"]["engines"]}
    zero = min(run.zeros)
    for (pid, number), gather in gathers(merged).items():
        came = run.came(number)
        assert gather["ts"] == came[rank_of[pid]] - zero
        found = gather["args"]["last_rank"], gather["args"]["waited_us"]
        if number >= max(run.dropped):
            assert found == (came.index(max(came)), max(came) - came[rank_of[pid]])
            assert found[1] <= gather["dur"]
        else:
            assert found == (None, None)


@hypothesis.given(runs(), st.randoms(use_true_random=False))
def test_neither_order_nor_steps_matter(run: Run, random: Any) -> None:
    names = list(run.traces())
    random.shuffle(names)
    traces = run.traces()
    at_once = merge_ranks(traces)
    first, *rest = names
    stepwise: Trace = traces[first]
    for name in rest:
        stepwise = merge_ranks({"merged.json": stepwise, name: traces[name]})
    assert gathers(stepwise) == gathers(at_once)
    assert stepwise["streamflow"] == at_once["streamflow"]
    assert merge_ranks({name: traces[name] for name in names})["streamflow"] == at_once["streamflow"]


@hypothesis.given(st.dictionaries(st.integers(0, 7), st.integers(0, 3), min_size=1))
def test_the_last_to_come(arrivals: dict[int, float]) -> None:
    rank, at = last_to_come(arrivals)
    assert arrivals[rank] == at
    assert all(came < at or (came == at and other >= rank) for other, came in arrivals.items())


RUN = Run(zeros=[100, 0], delays=[[0, 40], [0, 60]], dropped=[0, 0])


def test_moments_in_arguments_are_on_the_same_axis_and_the_traces_stay_as_they_were() -> None:
    traces = RUN.traces()
    before = copy.deepcopy(traces)
    merged = merge_ranks(traces)
    assert traces == before
    rung = [(e["ts"], e["args"]["rung_us"]) for e in merged["traceEvents"] if e["name"] == "BlockLeft"]
    assert rung == [(900.0, 800.0)] * 2
    assert merged["streamflow"]["clock"]["unix_ns_at_zero"] == ZERO_NS
    by_rank = {report.title: report.waited_by_rank for report in analyse(merged)}
    assert by_rank == {"Model, rank 0": {1: pytest.approx(100e-6)}, "Model, rank 1": {}}


def test_without_a_rank_nothing_is_known() -> None:
    run = Run(zeros=[0, 0, 0], delays=[[0, 40, 9]], dropped=[0, 0, 0])
    merged = merge_ranks({name: run.traces()[name] for name in ("trace-0.json", "trace-1.json")})
    assert {gather["args"]["last_rank"] for gather in gathers(merged).values()} == {None}


def other_run(trace: Trace) -> None:
    trace["streamflow"]["ranks"]["run"] = "b"


def no_ranks(trace: Trace) -> None:
    del trace["streamflow"]["ranks"]


@pytest.mark.parametrize(
    ("rank", "change", "problem"),
    [(1, other_run, "of another run than a.json"), (1, no_ranks, "no ranks gathered"), (0, None, "rank 0, as is a")],
)
def test_what_does_not_belong_together_is_refused(rank: int, change: Any, problem: str) -> None:
    trace = RUN.trace(rank)
    if change is not None:
        change(trace)
    with pytest.raises(RankTracesError, match=problem) as caught:
        merge_ranks({"a.json": RUN.trace(0), "b.json": trace})
    assert caught.value.path == "b.json"
