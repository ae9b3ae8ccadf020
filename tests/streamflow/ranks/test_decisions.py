"""What ranks decide together: the same on each, for a reason that names the rank that makes the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.ranks.decisions import (
    StoreDecision,
    StoreResult,
    agree_on_choice,
    agree_on_registration,
    agree_on_store,
    combine_choices,
    combine_registrations,
    combine_store,
)
from streamflow.store.codes import StoreCode
from streamflow.store.reports import StoreOutcome, StoreReport
from streamflow.transfer_choice import TransferChoice
from streamflow.weights.registering import RegistrationReport
from tests.streamflow.ranks.agreeing import AgreeingRank, AgreeingRanks, on_ranks
from tests.streamflow.ranks.kit import raise_first

HIT = StoreResult(StoreOutcome.LOCAL_HIT, "its weights were stored already", "one", uses_entry=True)
PUBLISHED = StoreResult(StoreOutcome.PUBLISHED, "its weights were published", "one", uses_entry=True)
OTHER = attrs.evolve(HIT, content_id="two")
KEPT = StoreResult(StoreOutcome.PUBLISHED, "the model keeps copies of its own", "one", uses_entry=False)
WITHOUT = StoreResult(StoreOutcome.CANONICAL_FALLBACK, "no space is left", None, uses_entry=False)
FAILED = StoreResult(StoreOutcome.FAILED, "the store is somebody else's", None, uses_entry=False)

TABLE: list[tuple[list[StoreResult], StoreDecision]] = [
    ([HIT, HIT], StoreDecision("entry", HIT.reason, is_same_content=True)),
    ([PUBLISHED, HIT, HIT], StoreDecision("entry", PUBLISHED.reason, is_same_content=True)),
    ([HIT, WITHOUT], StoreDecision("own", "rank 1: no space is left", 1)),
    ([WITHOUT, HIT], StoreDecision("own", "rank 0: no space is left", 0)),
    ([WITHOUT, WITHOUT], StoreDecision("own", "no space is left")),
    ([KEPT, KEPT], StoreDecision("own", KEPT.reason, is_same_content=True)),
    ([HIT, KEPT, HIT], StoreDecision("own", f"rank 1: {KEPT.reason}", 1, is_same_content=True)),
    ([HIT, HIT, OTHER], StoreDecision("fail", "rank 2 has the weights two, and rank 0 has one", 2)),
    ([WITHOUT, HIT, OTHER], StoreDecision("fail", "rank 2 has the weights two, and rank 1 has one", 2)),
    ([HIT, FAILED], StoreDecision("fail", "rank 1: the store is somebody else's", 1)),
    ([OTHER, HIT, FAILED], StoreDecision("fail", "rank 2: the store is somebody else's", 2)),
]


@pytest.mark.parametrize(("results", "decision"), TABLE, ids=lambda value: "")
def test_the_store(results: list[StoreResult], decision: StoreDecision) -> None:
    assert combine_store(results) == decision


results_of_ranks = st.lists(st.sampled_from([HIT, PUBLISHED, OTHER, KEPT, WITHOUT, FAILED]), min_size=1, max_size=6)


@given(results_of_ranks)
def test_all_use_their_entries_or_none_does(results: list[StoreResult]) -> None:
    decision = combine_store(results)
    contents = {result.content_id for result in results} - {None}
    if decision.action == "entry":
        assert all(result.uses_entry for result in results)
        assert len(contents) == 1
        assert decision.is_same_content
    if decision.action == "own":
        assert not all(result.uses_entry for result in results)
        assert len(contents) <= 1
    if decision.action == "fail":
        assert len(contents) > 1 or FAILED in results
    if decision.rank is not None:
        assert f"rank {decision.rank}" in decision.reason
    assert decision.is_same_content <= (len(contents) == 1 and None not in {r.content_id for r in results})


@given(results_of_ranks, st.integers(1, 5))
def test_ranks_that_have_come_to_the_same_name_none(results: list[StoreResult], size: int) -> None:
    alike = results[:1] * size
    assert (combine_store(alike).rank is None) == (alike[0] is not FAILED)


@pytest.mark.parametrize(
    ("problems", "decision"),
    [
        ([None], None),
        ([None, None, None], None),
        (["no driver", "no driver"], "no driver"),
        ([None, "over the limit"], "rank 1: over the limit"),
        (["over the limit", None], "rank 0: over the limit"),
        (["over the limit", "no driver"], "rank 0: over the limit"),
    ],
)
def test_registration(problems: list[str | None], decision: str | None) -> None:
    assert combine_registrations(problems) == decision


def choice(transfer: str, source: str = "module", why: str = "it is so") -> TransferChoice:
    return TransferChoice(source, f"the {source} is there", transfer, why)


choices_of_ranks = st.lists(
    st.builds(choice, st.sampled_from(["direct", "staged"]), st.sampled_from(["module", "artifact"]), st.text("ab")),
    min_size=1,
    max_size=5,
)


@given(choices_of_ranks)
def test_all_have_one_transfer_which_is_staged_if_one_is(choices: list[TransferChoice]) -> None:
    decisions = [combine_choices(choices, rank) for rank in range(len(choices))]
    staged = [rank for rank, each in enumerate(choices) if each.transfer == "staged"]
    for own, decision in zip(choices, decisions, strict=True):
        assert decision.choice.transfer == ("staged" if staged else "direct")
        if decision.choice != own:
            assert decision.choice.transfer_reason == f"rank {staged[0]}: {choices[staged[0]].transfer_reason}"
        assert (decision.choice.source, decision.choice.source_reason) == (own.source, own.source_reason)
    assert len({decision.problem for decision in decisions}) == 1
    assert (decisions[0].problem is None) == (len({each.source for each in choices}) == 1)


def test_ranks_that_stream_from_different_sources_are_told() -> None:
    problem = combine_choices([choice("direct"), choice("direct"), choice("direct", "artifact")], 1).problem
    assert problem is not None
    assert "rank 2 streams from its artifact (the artifact is there)" in problem
    assert "rank 0 from its module" in problem


@pytest.mark.anyio
async def test_ranks_ask_each_other() -> None:
    def report_of(rank: int) -> StoreReport:
        if rank == 1:
            return StoreReport(StoreOutcome.CANONICAL_FALLBACK, "no space is left", StoreCode.INSUFFICIENT_DISK)
        return StoreReport(StoreOutcome.LOCAL_HIT, "it is there", content_id="one", generation=1, remapped=True)

    async def work(rank: AgreeingRank) -> Sequence[Any]:
        store = await agree_on_store(rank, "Model", report_of(rank.rank), uses_entry=rank.rank != 1)
        problem = None if rank.rank else "over the limit"
        registration = await agree_on_registration(rank, "Model", RegistrationReport(problem=problem))
        decision = await agree_on_choice(rank, choice("staged" if rank.rank == 2 else "direct", why=str(rank.rank)))
        return store, registration, decision

    for number, (store, registration, decision) in enumerate(raise_first(await on_ranks(AgreeingRanks(3), work))):
        assert store == StoreDecision("own", "rank 1: no space is left", 1)
        assert registration == "rank 0: over the limit"
        assert decision == combine_choices(
            [choice("direct", why="0"), choice("direct", why="1"), choice("staged", why="2")], number
        )
