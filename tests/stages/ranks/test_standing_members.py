"""A member of a wave whose own code does not go on: left behind between walks, named where that cannot be."""

from __future__ import annotations

import attrs
import pytest

from streamflow.stages.feed import Feed
from streamflow.stages.ranks.duties import Duties
from streamflow.stages.ranks.errors import RankFailedError, WaveComponentsError
from streamflow.stages.ranks.local_waves import StandingMember, WaveProgress
from streamflow.stages.ranks.messages import (
    Ending,
    RankReply,
    RankStatus,
    RequestStatus,
    Standing,
    Verdict,
    WaveBegin,
    decode_status,
    encode,
)
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.ranks.wave_table import WaveTable
from streamflow.stages.ranks.wave_walks import WaveWalks
from streamflow.stages.testing.waves import ScriptedWaves
from streamflow.stages.walk_sources import SharedWalks, StandingPass
from streamflow.stages.walks import WalkPlanner

BLOCKS = [0, 1, 2]
WAVE = WaveSignature((("transformer", 3),))
LIMIT_S = 5.0


@attrs.define
class Waving:
    """A planner whose requests, numbered from 1, are in a wave; each of their passes has the request's number."""

    let_go_after_s: float | None
    num_members: int = 2
    now: float = 100.0
    waves: WaveWalks = attrs.field(init=False)
    planner: WalkPlanner = attrs.field(init=False)
    started: tuple[int, ...] | None = None
    again_at: float | None = None

    def __attrs_post_init__(self) -> None:
        self.waves = WaveWalks(Feed({"transformer": BLOCKS}), SharedWalks(4), let_go_after_s=self.let_go_after_s)
        self.planner = WalkPlanner({"transformer": BLOCKS}, 2, self.waves)
        self.waves.standing_passes = self.planner.standing_passes
        for number in range(1, self.num_members + 1):
            self.come(number)
        self.decide()
        self.waves.begin(1, WAVE, [request.ticket for request in self.waves.waiting()])
        self.decide()

    def decide(self) -> None:
        """Decide until nothing follows; every fetch is there at once.

        ``started``: the passes of the walk that started (None: there was none), ``again_at``: when to decide again.
        """
        self.started = None
        while True:
            decision = self.planner.decide(self.now)
            if decision.started is not None:
                self.started = decision.started.pass_ids
            for fetch in decision.fetches:
                if self.planner.fetched(fetch.slot, fetch.generation):
                    self.planner.arrived(fetch.slot, fetch.generation)
            if not decision.fetches and decision.again_at != self.now:
                self.again_at = decision.again_at
                return

    def come(self, number: int) -> None:
        """A pass of request ``number`` waits for a walk."""
        self.planner.join(number, "transformer", maker=number, now=self.now, request_id=f"r{number}", wave=WAVE)

    def run(self, number: int, blocks: list[int] = BLOCKS, *, end: bool = True) -> None:
        """The pass of request ``number`` runs ``blocks``, which are there, and ends."""
        for block in blocks:
            self.planner.want(number, block, 0)
            self.decide()
            assert self.planner.slot_of(block) is not None
            self.planner.left(number, block)
        if end:
            self.planner.end(number, completed=True, now=self.now)
        self.decide()

    def walk(self) -> None:
        """The members that are in a walk run it, side by side."""
        for block in BLOCKS:
            for number in range(1, self.num_members + 1):
                self.run(number, [block], end=False)
        for number in range(1, self.num_members + 1):
            self.run(number, [])


def test_the_next_walk_goes_on_without_a_member_that_does_not_come_in_time() -> None:
    waving = Waving(LIMIT_S)
    waving.walk()
    waving.now += 1
    waving.come(1)
    waving.decide()
    assert waving.started is None
    assert waving.again_at == 100.0 + LIMIT_S
    waving.now = 100.0 + LIMIT_S
    waving.decide()
    assert waving.started == (1,)
    assert waving.waves.progress().num_live == 1


def test_who_was_left_behind_waits_for_another_wave() -> None:
    waving = Waving(LIMIT_S)
    waving.walk()
    waving.come(1)
    waving.decide()
    waving.now += LIMIT_S
    waving.decide()
    waving.come(2)
    waving.run(1)
    assert [request.name for request in waving.waves.waiting()] == ["r2"]
    waving.come(1)
    waving.decide()
    waving.run(1)
    assert waving.waves.progress().is_over
    waving.waves.begin(2, WAVE, [request.ticket for request in waving.waves.waiting()])
    waving.decide()
    assert waving.started == (2,)


def test_a_rank_whose_members_all_stay_away_feeds_the_others() -> None:
    waving = Waving(LIMIT_S, num_members=1)
    waving.walk()
    waving.now += LIMIT_S
    waving.decide()
    assert waving.started == ()
    assert waving.waves.progress().num_live == 0


def test_who_comes_to_a_later_component_than_its_waves_first_is_told_that_it_was_left_behind() -> None:
    wave = WaveSignature((("high", 1), ("low", 1)))
    waves = WaveWalks(Feed({"high": [0], "low": [1]}), SharedWalks(4), let_go_after_s=LIMIT_S)
    planner = WalkPlanner({"high": [0], "low": [1]}, 2, waves)
    planner.join(1, "high", maker=1, now=100.0, request_id="r1", wave=wave)
    planner.decide(100.0)
    waves.begin(1, wave, [1])
    for fetch in planner.decide(100.0).fetches:
        planner.fetched(fetch.slot, fetch.generation)
    planner.want(1, 0, 1)
    planner.left(1, 0)
    planner.end(1, completed=True, now=101.0)
    planner.decide(101.0)
    assert planner.decide(101.0 + LIMIT_S).started is not None
    planner.join(2, "low", maker=1, now=107.0, request_id="r1", wave=wave)
    [refused] = [*planner.decide(107.0).refused, *planner.decide(107.0).refused]
    assert isinstance(refused.error, WaveComponentsError)
    assert "its wave has left it behind" in str(refused.error)
    wrong = WaveComponentsError("r1", "low", WaveSignature((("low", 1), ("vae", 1))), ["high", "low"])
    assert "behind" not in str(wrong)


def test_each_walk_gives_members_the_whole_time() -> None:
    waving = Waving(LIMIT_S, num_members=1)
    for _ in range(2):
        waving.walk()
        waving.now += LIMIT_S - 1
        waving.decide()
        assert waving.started is None
        waving.come(1)
        waving.decide()
        assert waving.started == (1,)


def test_without_a_limit_members_are_waited_for() -> None:
    waving = Waving(None)
    waving.walk()
    waving.come(1)
    waving.now += 1e9
    waving.decide()
    assert (waving.started, waving.again_at) == (None, None)


def test_who_may_not_be_left_behind_stands_between_walks() -> None:
    waving = Waving(None)
    waving.walk()
    waving.come(1)
    waving.decide()
    assert list(waving.waves.standing()) == [StandingMember("r2", 1)]
    waving.come(2)
    waving.decide()
    assert waving.started is not None
    waving.run(2, BLOCKS[:1], end=False)
    assert [each.name for each in waving.waves.standing()] == ["r1", "r2"]


def test_who_stands_between_walks_and_will_be_left_behind_is_not_said() -> None:
    waving = Waving(LIMIT_S)
    waving.walk()
    waving.decide()
    assert list(waving.waves.standing()) == []


def test_members_stand_before_a_block_that_is_there_and_after_the_last_one() -> None:
    waving = Waving(LIMIT_S, num_members=1)
    assert list(waving.waves.standing()) == [StandingMember("r1", 1, 0)]
    waving.run(1, [0], end=False)
    assert list(waving.waves.standing()) == [StandingMember("r1", 1, 1)]
    waving.run(1, [1, 2], end=False)
    assert list(waving.waves.standing()) == [StandingMember("r1", 1, None)]


def test_who_waits_for_a_block_that_is_not_there_does_not_stand() -> None:
    waving = Waving(LIMIT_S, num_members=1)
    waving.run(1, [0], end=False)
    waving.planner.want(1, 1, 0)
    waving.planner.left(1, 1)
    [fetch] = waving.planner.decide(waving.now).fetches  # of the next walk's first block; block 2 was fetched before
    assert waving.planner.standing_passes() == [StandingPass("r1", 2)]
    waving.planner.want(1, 2, 0)
    waving.planner.left(1, 2)
    waving.planner.end(1, completed=True)
    waving.planner.decide(waving.now)
    waving.come(1)
    assert waving.planner.decide(waving.now).started is not None
    assert waving.planner.standing_passes() == []
    waving.planner.fetched(fetch.slot, fetch.generation)
    assert waving.planner.standing_passes() == [StandingPass("r1", 0)]


def test_outside_of_waves_nobody_stands() -> None:
    planner = WalkPlanner({"transformer": BLOCKS}, 2)
    planner.join(1, "transformer")
    for fetch in planner.decide().fetches:
        planner.fetched(fetch.slot, fetch.generation)
    planner.decide()
    assert planner.standing_passes() == []


def test_who_stands_in_a_walk_of_this_rank_alone_holds_up_the_wave_that_began_meanwhile() -> None:
    """As in an encoder that is streamed: its walk has the window, and the rank brings nothing to the others."""
    waves = WaveWalks(Feed({"transformer": BLOCKS}), SharedWalks(4), let_go_after_s=LIMIT_S)
    planner = WalkPlanner({"encoder": [7, 8], "transformer": BLOCKS}, 2, waves)
    waves.standing_passes = planner.standing_passes

    def stands() -> list[StandingMember]:
        for fetch in planner.decide(100.0).fetches:
            planner.fetched(fetch.slot, fetch.generation)
        planner.decide(100.0)
        return list(waves.standing())

    planner.join(1, "encoder", maker=1, now=100.0, request_id="r1", wave=WAVE)
    planner.want(1, 7, 1)
    assert stands() == []  # nobody waits for it
    waves.begin(1, WAVE, [])
    assert stands() == [StandingMember("r1", 0, 7)]
    planner.left(1, 7)
    assert stands() == [StandingMember("r1", 0, 8)]
    planner.left(1, 8)
    assert stands() == [StandingMember("r1", 0, None)]
    planner.end(1, completed=True)
    assert stands() == []
    assert waves.progress().num_started == 1


def test_who_waits_in_a_walk_of_this_rank_alone_for_a_block_does_not_stand() -> None:
    waves = WaveWalks(Feed({"transformer": BLOCKS}), SharedWalks(4))
    planner = WalkPlanner({"encoder": [7, 8], "transformer": BLOCKS}, 1, waves)
    planner.join(1, "encoder", maker=1, request_id="r1", wave=WAVE)
    planner.want(1, 7, 1)
    [fetch] = planner.decide().fetches
    waves.begin(1, WAVE, [])
    assert planner.standing_passes() == []
    planner.fetched(fetch.slot, fetch.generation)
    planner.decide()
    assert planner.standing_passes() == [StandingPass("r1", 7)]


def test_a_rank_says_how_long_the_same_members_have_stood_at_the_same_place() -> None:
    waves = ScriptedWaves(lambda: 100.0)
    duties = Duties(waves, 60.0)
    ticket = waves.add(WAVE)
    duties.do(RankReply(begin=WaveBegin(1, WAVE, "it", (ticket,), ())), 100.0)
    assert duties.status(101.0).standing is None
    waves.stand(ticket, block=1)
    assert duties.status(102.0).standing == Standing(("request 0",), 0.0)
    assert duties.status(104.5).standing == Standing(("request 0",), 2.5)
    waves.stand(ticket, block=2)
    assert duties.status(105.0).standing == Standing(("request 0",), 0.0)
    waves.walk()
    assert duties.status(106.0).standing is None
    waves.stand(ticket, block=2)  # of the next walk
    assert duties.status(107.0).standing == Standing(("request 0",), 0.0)


def test_who_is_at_the_same_place_of_another_wave_has_moved() -> None:
    """As a thread whose calls are waves of one walk each: it is looked at in the same block every time."""
    once, waves = WaveSignature((("transformer", 1),)), ScriptedWaves(lambda: 100.0)
    duties = Duties(waves, 60.0)
    for wave in (1, 2):
        ticket = waves.add(once, "a direct call")
        duties.do(RankReply(begin=WaveBegin(wave, once, "it", (ticket,), ())), 100.0)
        waves.walk()
        waves.stand(ticket, block=0, name="a direct call")
        assert duties.status(100.0 + wave).standing == Standing(("a direct call",), 0.0)


def test_what_stands_is_told_over_the_wire() -> None:
    status = RankStatus(standing=Standing(("a red fox", "a direct call"), 3.25))
    assert decode_status(encode(status)) == status


def at(walk: int, visit: int, seconds: float | None = None, *, over: bool = False) -> RankStatus:
    """What a rank says that is in a wave's walk of that number; its request has stood for ``seconds``."""
    standing = None if seconds is None else Standing((f"r{visit}",), seconds)
    return RankStatus(progress=WaveProgress(1, walk, 3, 1, over, visit), standing=standing)


def verdict_on(*statuses: RankStatus, limit_s: float | None = LIMIT_S) -> Verdict | None:
    """The verdict in the first wave."""
    table = WaveTable(WaveOptions(max_passes=1, member_deadline_s=limit_s))
    waiting = RequestStatus(0, "r", WAVE, 1.0)
    table.decide([RankStatus(progress=WaveProgress(0, 0, 0, 0, True), waiting=(waiting,)) for _ in statuses])
    return table.decide(list(statuses))[0].verdict


def test_the_rank_that_has_held_the_wave_up_for_too_long_has_failed_all() -> None:
    assert verdict_on(at(1, 2), at(1, 1, 4.9), at(1, 2, 1.0)) is None
    verdict = verdict_on(at(1, 2, 4.0), at(1, 3), at(1, 1, 5.5))
    assert verdict is not None
    assert (verdict.ending, verdict.rank) == (Ending.FAILED, 2)
    for part in ("'r1'", "5.5 s", "member_deadline_s is 5", "ranks 0 stood still"):
        assert part in verdict.reason
    assert isinstance(verdict.error(), RankFailedError)
    alone = verdict_on(at(1, 1, 5.0), at(1, 3))
    assert alone is not None
    assert "stood still, too" not in alone.reason


def test_a_rank_that_another_one_is_behind_has_failed_nobody() -> None:
    """It stands in a collective of the model's own."""
    for behind in (at(1, 1), at(1, 1, 4.9), at(0, 4), at(0, 4, 1.0)):
        assert verdict_on(at(1, 4, 9.0), behind) is None
    for behind in (at(1, 1, 5.0), at(0, 4, 5.0)):
        verdict = verdict_on(at(1, 4, 9.0), behind)
        assert verdict is not None
        assert verdict.rank == 1


def test_of_ranks_at_the_same_place_none_has_failed_while_one_is_on_the_move() -> None:
    assert verdict_on(at(1, 4, 9.0), at(1, 4)) is None
    assert verdict_on(at(1, 4, 9.0), at(1, 4, 4.9)) is None
    verdict = verdict_on(at(1, 4, 6.0), at(1, 4, 9.0))
    assert verdict is not None
    assert verdict.rank == 1


def test_a_rank_whose_wave_is_over_is_not_waited_for() -> None:
    verdict = verdict_on(at(3, 5, 9.0), at(3, 4, over=True))
    assert verdict is not None
    assert verdict.rank == 0


def test_a_rank_says_which_visit_it_needs_first() -> None:
    waving = Waving(LIMIT_S)
    assert waving.waves.progress().first_visit == 0
    waving.run(1, [0, 1], end=False)
    assert waving.waves.progress().first_visit == 0
    waving.run(2, [0], end=False)
    assert waving.waves.progress().first_visit == 1
    waving.run(2, [1, 2])
    waving.run(1, [2])
    assert (waving.waves.progress().num_started, waving.waves.progress().first_visit) == (1, 3)


def test_without_a_limit_nobody_fails_for_standing() -> None:
    assert verdict_on(at(1, 1, 1e9), at(1, 2), limit_s=None) is None


@pytest.mark.parametrize("shared", [False, True])
def test_members_that_ranks_share_are_never_left_behind(shared: bool) -> None:
    options = WaveOptions(max_passes=1, member_deadline_s=LIMIT_S, needs_all_ranks=shared)
    assert options.let_go_after_s == (None if shared else LIMIT_S)
