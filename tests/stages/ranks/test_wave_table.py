"""What the coordinating rank decides: rules by example, and promises over many rounds."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamflow.stages.ranks.duties import Duties
from streamflow.stages.ranks.errors import WaveMismatchError, WaveTimeoutError
from streamflow.stages.ranks.local_waves import WaveProgress
from streamflow.stages.ranks.messages import (
    Closing,
    Ending,
    Proposal,
    RankReply,
    RankStatus,
    RequestStatus,
    Verdict,
    decode_reply,
    decode_status,
    encode,
)
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.ranks.wave_table import WaveTable
from streamflow.stages.testing.waves import ScriptedWaves

OPTIONS = WaveOptions(max_passes=2, window_s=2.0, deadline_s=10.0)
SHARED = attrs.evolve(OPTIONS, needs_all_ranks=True)
LONG, SHORT = WaveSignature((("transformer", 3),)), WaveSignature((("transformer", 2),), passes_per_step=2)
NONE_YET = WaveProgress(0, 0, 0, 0, True)


def asks(ticket: int, waited_s: float, signature: WaveSignature = LONG) -> RequestStatus:
    return RequestStatus(ticket, f"r{ticket}", signature, waited_s)


def waits(*requests: RequestStatus, progress: WaveProgress | None = NONE_YET) -> RankStatus:
    return RankStatus(progress=progress, waiting=requests)


def walks(started: int, live: int, *requests: RequestStatus, promise: int | None = None, of: int = 3) -> RankStatus:
    """A status within the first wave."""
    progress = WaveProgress(1, started, of, live, started == of)
    return RankStatus(progress=progress, waiting=requests, promise=promise)


def members(replies: Sequence[RankReply]) -> list[tuple[int, ...] | None]:
    return [None if reply.begin is None else reply.begin.members for reply in replies]


def begun() -> WaveTable:
    """A table whose first wave, a long one, is under way."""
    table = WaveTable(OPTIONS)
    assert members(table.decide([waits(asks(0, 2.0)), waits()])) == [(0,), ()]
    return table


def test_a_wave_begins_when_the_oldest_request_has_waited_for_the_window() -> None:
    table = WaveTable(OPTIONS)
    early = table.decide([waits(asks(0, 1.9)), waits(asks(0, 0.1)), waits()])
    assert members(early) == [None] * 3
    assert all(reply.is_busy for reply in early)
    replies = table.decide([waits(asks(0, 2.0)), waits(asks(0, 0.2)), waits()])
    assert members(replies) == [(0,), (0,), ()]
    assert {reply.begin and (reply.begin.wave, reply.begin.signature) for reply in replies} == {(1, LONG)}


def test_it_begins_early_when_every_rank_has_as_many_as_it_may() -> None:
    full, half = waits(asks(0, 0.1), asks(1, 0.1), asks(2, 0.0)), waits(asks(5, 0.2))
    assert members(WaveTable(OPTIONS).decide([full, half])) == [None, None]
    more = waits(asks(5, 0.2), asks(6, 0.0, SHORT), asks(7, 0.0))
    assert members(WaveTable(OPTIONS).decide([full, more])) == [(0, 1), (5, 7)]


def test_a_rank_is_full_with_one_request_beside_which_none_can_wait() -> None:
    only = attrs.evolve(asks(3, 0.1), alone=True)
    assert members(WaveTable(OPTIONS).decide([waits(only), waits(asks(5, 0.1))])) == [None, None]
    assert members(WaveTable(OPTIONS).decide([waits(only), waits(asks(5, 0.1), asks(6, 0.0))])) == [(3,), (5, 6)]


def test_where_ranks_share_each_request_none_walks_with_ranks_that_only_feed() -> None:
    table = WaveTable(SHARED)
    assert members(table.decide([waits(asks(0, 9.0)), waits()])) == [None, None]
    assert members(table.decide([waits(asks(0, 9.0)), waits(asks(4, 9.0, SHORT))])) == [None, None]
    assert members(table.decide([waits(asks(0, 9.0), asks(1, 8.0)), waits(asks(4, 0.1))])) == [(0,), (4,)]


def test_where_ranks_share_each_request_the_oldest_that_all_have_is_next_and_none_is_refused() -> None:
    replies = WaveTable(SHARED).decide(
        [waits(asks(0, 5.0), asks(1, 3.0, SHORT)), waits(asks(8, 4.0, SHORT), asks(9, 2.0, SHORT))]
    )
    begins = [reply.begin for reply in replies]
    assert [begin and (begin.signature, begin.members, begin.refused) for begin in begins] == [
        (SHORT, (1,), ()),
        (SHORT, (8,), ()),
    ]


def test_where_ranks_share_each_request_one_that_not_all_get_is_timed_out() -> None:
    replies = WaveTable(SHARED).decide([waits(asks(0, 10.0)), waits(asks(4, 2.0, SHORT))])
    assert [reply.timed_out for reply in replies] == [(0,), ()]


def test_requests_with_another_signature_do_not_make_a_rank_full() -> None:
    full, mixed = waits(asks(0, 0.1), asks(1, 0.1)), waits(asks(5, 0.0), asks(6, 0.0, SHORT))
    assert members(WaveTable(OPTIONS).decide([full, mixed])) == [None, None]


def test_the_oldest_request_gives_the_signature_and_those_that_differ_are_refused() -> None:
    replies = WaveTable(OPTIONS).decide([waits(asks(0, 2.5), asks(1, 2.1, SHORT)), waits(asks(9, 3.0, SHORT))])
    begins = [reply.begin for reply in replies]
    assert [begin and (begin.members, begin.refused) for begin in begins] == [((1,), (0,)), ((9,), ())]
    assert begins[0] is not None
    assert (begins[0].signature, begins[0].founder) == (SHORT, "request 'r9' of rank 1")


def test_of_equally_old_requests_that_of_the_lowest_rank_counts() -> None:
    replies = WaveTable(OPTIONS).decide([waits(), waits(asks(0, 3.0, SHORT)), waits(asks(0, 3.0))])
    assert members(replies) == [(), (0,), ()]


def test_requests_beyond_the_limit_of_a_rank_wait_for_the_next_wave() -> None:
    first = WaveTable(OPTIONS).decide([waits(asks(0, 3.0), asks(1, 2.0), asks(2, 1.0)), waits()])
    assert [reply.begin and reply.begin.refused for reply in first] == [(), ()]
    assert members(first) == [(0, 1), ()]


def test_requests_that_come_during_a_wave_wait_until_it_is_over_on_every_rank() -> None:
    table = begun()
    late = asks(7, 5.0, SHORT)
    assert members(table.decide([walks(1, 1, late), walks(1, 0)])) == [None, None]
    assert members(table.decide([walks(3, 0, late), walks(2, 0)])) == [None, None]
    replies = table.decide([walks(3, 0, late), walks(3, 0)])
    assert members(replies) == [(7,), ()]
    assert replies[1].begin is not None
    assert replies[1].begin.wave == 2


def test_no_wave_begins_before_every_rank_can() -> None:
    table = WaveTable(OPTIONS)
    assert members(table.decide([waits(asks(0, 5.0)), waits(progress=None)])) == [None, None]
    assert members(table.decide([waits(asks(0, 5.0)), waits()])) == [(0,), ()]


def test_a_request_that_waited_too_long_is_timed_out_unless_a_wave_begins_with_it() -> None:
    table = begun()
    replies = table.decide([walks(1, 1, asks(4, 10.0), asks(5, 9.9)), walks(1, 0, asks(4, 11.0))])
    assert [reply.timed_out for reply in replies] == [(4,), (4,)]
    last = table.decide([walks(3, 0, asks(5, 12.0), asks(6, 11.0), asks(7, 10.0)), walks(3, 0)])
    assert members(last) == [(5, 6), ()]
    assert last[0].timed_out == (7,)


def test_a_wave_without_members_ends_after_the_largest_promise() -> None:
    table = begun()
    assert not any(reply.hold for reply in table.decide([walks(1, 1), walks(0, 0)]))
    held = table.decide([walks(1, 0), walks(0, 0)])
    assert all(reply.hold and reply.is_busy and reply.end_after is None for reply in held)
    told = table.decide([walks(1, 0, promise=2), walks(0, 0, promise=1)])
    assert [(reply.hold, reply.end_after) for reply in told] == [(False, 2)] * 2
    again = table.decide([walks(1, 0, of=2), walks(1, 0, of=2)])
    assert [(reply.hold, reply.end_after) for reply in again] == [(False, None)] * 2


def test_a_wave_does_not_end_while_a_rank_has_not_promised() -> None:
    replies = begun().decide([walks(1, 0, promise=2), walks(0, 0)])
    assert [(reply.hold, reply.end_after) for reply in replies] == [(True, None)] * 2


def test_every_wave_can_end_early() -> None:
    table = begun()
    table.decide([walks(1, 0, promise=1), walks(1, 0, promise=1)])
    assert members(table.decide([walks(1, 0, asks(8, 5.0), of=1), walks(1, 0, of=1)])) == [(8,), ()]
    second = RankStatus(progress=WaveProgress(2, 1, 3, 0, False), promise=1)
    assert [reply.end_after for reply in table.decide([second, second])] == [1, 1]


def test_a_wave_whose_walks_all_started_is_not_held() -> None:
    assert not any(reply.hold for reply in begun().decide([walks(3, 0), walks(3, 0)]))


def test_the_next_wave_does_not_begin_with_the_end_of_the_last_one() -> None:
    table = begun()
    table.decide([walks(2, 0), walks(2, 0)])
    replies = table.decide([walks(3, 0, asks(8, 5.0), promise=3), walks(3, 0, promise=3)])
    assert (members(replies), replies[0].end_after) == ([None, None], 3)
    assert members(table.decide([walks(3, 0, asks(8, 5.0)), walks(3, 0)])) == [(8,), ()]


def test_proposals_are_answered_once_every_rank_has_one() -> None:
    table = WaveTable(OPTIONS)
    first, second = Proposal(0, "sizes", [1]), Proposal(5, "sizes", [2])
    alone = table.decide([RankStatus(proposal=first), RankStatus()])
    assert [(reply.agreed, reply.is_busy) for reply in alone] == [(None, True)] * 2
    both = table.decide([RankStatus(proposal=first), RankStatus(proposal=second)])
    assert [reply.agreed for reply in both] == [(first, second)] * 2


def test_proposals_of_different_names_are_answered_when_they_stay() -> None:
    table = WaveTable(OPTIONS)
    first, other, same = Proposal(0, "sizes", 1), Proposal(0, "names", 1), Proposal(1, "names", 1)
    statuses = [RankStatus(proposal=first), RankStatus(proposal=other)]
    assert [reply.agreed for reply in table.decide(statuses)] == [None, None]
    assert table.decide([statuses[0], RankStatus(proposal=same)])[0].agreed is None
    assert table.decide(statuses)[0].agreed is None
    assert [reply.agreed for reply in table.decide(statuses)] == [(first, other)] * 2


def test_ranks_with_nothing_to_say_may_be_slow() -> None:
    assert not any(reply.is_busy for reply in WaveTable(OPTIONS).decide([waits(), waits(), RankStatus()]))
    assert not any(reply.is_busy for reply in begun().decide([walks(1, 1), walks(1, 1)]))


def test_a_failure_is_told_to_all_and_nothing_else() -> None:
    broken = RankStatus(progress=NONE_YET, failure="OSError: no space")
    leaving = RankStatus(progress=NONE_YET, closing=Closing.NOW)
    replies = WaveTable(OPTIONS).decide([leaving, broken, waits(asks(0, 5.0))])
    assert replies == [RankReply(verdict=Verdict(Ending.FAILED, 1, "OSError: no space"))] * 3


def test_a_rank_in_another_wave_is_a_failure_of_that_rank() -> None:
    verdict = begun().decide([walks(1, 1), waits()])[0].verdict
    assert verdict is not None
    assert (verdict.ending, verdict.rank) == (Ending.FAILED, 1)


def test_closing_waits_for_the_wave_under_way_and_lets_none_begin() -> None:
    table = begun()
    closing = RankStatus(progress=WaveProgress(1, 1, 3, 0, False), closing=Closing.WHEN_OVER)
    running = table.decide([walks(1, 1, asks(5, 5.0)), closing])
    assert all(reply.verdict is None and reply.is_busy for reply in running)
    closed = RankStatus(progress=WaveProgress(1, 3, 3, 0, True), closing=Closing.WHEN_OVER)
    over = table.decide([walks(3, 0, asks(5, 5.0)), closed])
    assert [reply.verdict for reply in over] == [Verdict(Ending.CLOSED, 1, "")] * 2


def test_closing_now_waits_for_nothing() -> None:
    leaving = RankStatus(progress=WaveProgress(1, 1, 3, 0, False), closing=Closing.NOW)
    assert begun().decide([walks(1, 1), leaving])[0].verdict == Verdict(Ending.CLOSED, 1, "")


requests = st.builds(
    RequestStatus,
    st.integers(0, 99),
    st.text(max_size=5),
    st.sampled_from([LONG, SHORT]),
    st.floats(0, 100),
    st.booleans(),
)
progresses = st.builds(WaveProgress, *[st.integers(0, 9)] * 4, st.booleans())
proposals = st.builds(
    Proposal, st.integers(0, 9), st.text(max_size=5), st.recursive(st.none() | st.integers(), st.lists)
)
statuses = st.builds(
    RankStatus,
    progress=st.none() | progresses,
    waiting=st.lists(requests, max_size=3).map(tuple),
    promise=st.none() | st.integers(0, 9),
    proposal=st.none() | proposals,
    closing=st.sampled_from(Closing),
    failure=st.none() | st.text(max_size=5),
)


@settings(max_examples=30)
@given(statuses)
def test_a_status_travels_as_it_is(status: RankStatus) -> None:
    assert decode_status(encode(status)) == status


@settings(max_examples=30)
@given(st.lists(statuses, min_size=2, max_size=3))
def test_replies_travel_as_they_are_whatever_ranks_say(said: list[RankStatus]) -> None:
    table = WaveTable(OPTIONS)
    for reply in table.decide(said):
        assert decode_reply(encode(reply)) == reply


class Waves(RuleBasedStateMachine):
    """Ranks whose requests come, end and walk at any time, between rounds at any time."""

    @initialize(aheads=st.lists(st.integers(0, 2), min_size=2, max_size=4))
    def start(self, aheads: list[int]) -> None:
        self.now = 100.0
        self.ranks = [ScriptedWaves(lambda: self.now, num_ahead) for num_ahead in aheads]
        self.duties = [Duties(rank, OPTIONS.deadline_s) for rank in self.ranks]
        self.table = WaveTable(OPTIONS)
        self.added: list[set[int]] = [set() for _ in self.ranks]

    @rule(which=st.integers(0, 3), signature=st.sampled_from([LONG, LONG, SHORT]))
    def a_request_comes(self, which: int, signature: WaveSignature) -> None:
        rank = which % len(self.ranks)
        self.added[rank].add(self.ranks[rank].add(signature))

    @precondition(lambda self: any(self.added))
    @rule(which=st.integers(0, 3), ticket=st.integers(0, 5))
    def a_request_ends(self, which: int, ticket: int) -> None:
        self.ranks[which % len(self.ranks)].end(ticket)

    @rule(which=st.integers(0, 3))
    def a_rank_walks(self, which: int) -> None:
        rank = self.ranks[which % len(self.ranks)]
        if rank.can_walk():
            rank.walk()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_round(self) -> None:
        said = [decode_status(encode(duties.status(self.now))) for duties in self.duties]
        for duties, reply in zip(self.duties, self.table.decide(said), strict=True):
            assert reply.verdict is None
            duties.do(decode_reply(encode(reply)), self.now)

    @invariant()
    def ranks_are_in_the_same_waves(self) -> None:
        first = [(begun.wave, begun.signature) for begun in self.ranks[0].begun]
        assert [wave for wave, _ in first] == list(range(1, len(first) + 1))
        for rank in self.ranks:
            assert [(begun.wave, begun.signature) for begun in rank.begun] == first
            assert all(len(begun.members) <= OPTIONS.max_passes for begun in rank.begun)

    @invariant()
    def past_waves_had_as_many_walks_everywhere(self) -> None:
        for begun in self.ranks[0].begun[:-1]:
            assert len({rank.num_walks_done[begun.wave] for rank in self.ranks}) == 1

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        for _ in range(100):
            self.a_round()
            self.time_passes(0.1)
            for rank in self.ranks:
                if rank.can_walk():
                    rank.walk()
        self.past_waves_had_as_many_walks_everywhere()
        for rank, added in zip(self.ranks, self.added, strict=True):
            assert rank.progress().is_over
            in_waves = [ticket for begun in rank.begun for ticket in begun.members]
            assert sorted([*in_waves, *rank.refused, *rank.withdrawn]) == sorted(added)
            assert all(isinstance(error, WaveMismatchError | WaveTimeoutError) for error in rank.refused.values())


TestWaves = Waves.TestCase
TestWaves.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_ranks_that_all_stop_early_agree_on_the_walks_they_did(num_ahead: int) -> None:
    machine = Waves()
    machine.start([num_ahead, 0, 0])
    machine.a_request_comes(1, LONG)
    machine.time_passes(3.0)
    machine.a_round()
    machine.a_rank_walks(0)
    machine.a_request_ends(1, 0)
    machine.teardown()
    assert [rank.num_walks_done[1] for rank in machine.ranks] == [1 + num_ahead] * 3
