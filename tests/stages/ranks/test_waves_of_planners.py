"""Several ranks' walk planners in one wave: whatever the pace of each, all fetch the same blocks in the same order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest

from streamflow.stages.decisions import Claim, Decision
from streamflow.stages.feed import Feed
from streamflow.stages.ranks.errors import OutOfTurnError, SignatureMissingError, WaveComponentsError
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.ranks.wave_walks import WaveWalks
from streamflow.stages.walk_sources import SharedWalks
from streamflow.stages.walks import WalkPlanner

COLLECTIVE = "transformer"
LOCAL = "encoder"


@attrs.define(eq=False)
class Maker:
    """A request: the passes that it still makes, each the blocks that it runs."""

    number: int
    wave: WaveSignature | None
    passes: list[tuple[str, list[int]]]
    pass_id: int = 0
    rest: list[int] = attrs.field(factory=list)
    told: dict[int, Claim] = attrs.field(factory=dict)
    serial: int = 0
    wants: int | None = None
    inside: int | None = None
    component: str = ""
    gone: bool = False
    error: Exception | None = None


class Rank:
    """A planner, its requests, and fetches that end when the test lets them."""

    def __init__(self, orders: dict[str, list[int]], num_slots: int, draw: random.Random) -> None:
        self.draw = draw
        self.orders = orders
        self.waves = WaveWalks(Feed({COLLECTIVE: orders[COLLECTIVE]}), SharedWalks(4))
        self.planner = WalkPlanner(orders, num_slots, self.waves)
        self.makers: list[Maker] = []
        self.gathers: list[int] = []  # the blocks of its collectives, in order
        self.in_flight: list[tuple[int, int, bool]] = []  # slot, generation, whether issued
        self.slots: dict[int, int] = {}
        self.num_passes = 0
        self.num_walks: dict[str, int] = {COLLECTIVE: 0, LOCAL: 0}

    def actions(self, num_gathered: int) -> list[str]:
        """What could happen next here. A collective is done once every rank has begun it."""
        found = [f"maker {index}" for index, maker in enumerate(self.makers) if self._can_go(maker)]
        return found + [
            f"fetch {index}"
            for index, (slot, _, _) in enumerate(self.in_flight)
            if self.slots[slot] not in self.orders[COLLECTIVE] or self._gather_number(index) < num_gathered
        ]

    def _gather_number(self, index: int) -> int:
        """Which of this rank's collectives a fetch in flight is: they are begun in order."""
        later = sum(1 for slot, _, _ in self.in_flight[index:] if self.slots[slot] in self.orders[COLLECTIVE])
        return len(self.gathers) - later

    def _can_go(self, maker: Maker) -> bool:
        return not maker.gone and (maker.wants is None or maker.wants in maker.told or maker.error is not None)

    def act(self, action: str) -> None:
        kind, index = action.split()
        if kind == "fetch":
            self._fetch(int(index))
        else:
            self._go_on(self.makers[int(index)])
        self.settle()

    def _fetch(self, index: int) -> None:
        slot, generation, is_issued = self.in_flight[index]
        if not is_issued and self.planner.fetched(slot, generation):
            self.in_flight[index] = (slot, generation, True)
            return
        if is_issued:
            self.planner.arrived(slot, generation)
        del self.in_flight[index]

    def _go_on(self, maker: Maker) -> None:
        if maker.error is not None:
            return self._end(maker, completed=False)
        if maker.inside is not None:
            self.planner.left(maker.pass_id, maker.inside)
            maker.inside = None
        elif maker.wants is not None:
            self._enter(maker)
        elif maker.rest:
            maker.wants = maker.rest.pop(0)
            if maker.wants in maker.told:
                self._enter(maker)
            else:
                self._ask(maker)
        elif maker.pass_id:
            self.planner.end(maker.pass_id, completed=True)
            maker.pass_id = 0
        elif maker.passes:
            maker.component, blocks = maker.passes.pop(0)
            self.num_passes += 1
            maker.pass_id, maker.rest, maker.serial = self.num_passes, list(blocks), 0
            maker.told.clear()
            self.planner.join(
                maker.pass_id, maker.component, maker=maker.number, request_id=f"r{maker.number}", wave=maker.wave
            )
        else:
            self._end(maker, completed=True)

    def _ask(self, maker: Maker) -> None:
        maker.serial += 1
        maker.told.clear()
        assert maker.wants is not None
        refusal = self.planner.want(maker.pass_id, maker.wants, maker.serial)
        if refusal is not None:
            maker.error = refusal.error

    def _enter(self, maker: Maker) -> None:
        assert maker.wants is not None
        claim = maker.told.pop(maker.wants)
        assert self.planner.slot_of(maker.wants) == claim.slot
        passed_by = [block for block, other in maker.told.items() if other.rank < claim.rank]
        for block in passed_by:
            del maker.told[block]
        maker.inside, maker.wants = claim.block, None
        if passed_by:
            self.planner.left(maker.pass_id, claim.block, passed_by)
            maker.inside = None

    def stop(self, maker: Maker) -> None:
        """The request is cancelled."""
        if not maker.gone:
            self._end(maker, completed=False)
            self.settle()

    def _end(self, maker: Maker, *, completed: bool) -> None:
        if maker.pass_id:
            self.planner.end(maker.pass_id, completed=completed)
        self.planner.gone(maker.number)
        maker.gone = True

    def settle(self) -> None:
        while True:
            decision = self.planner.decide()
            self._note(decision)
            if not decision.fetches and decision.again_at is None:
                return

    def _note(self, decision: Decision) -> None:
        if decision.started is not None:
            self.num_walks[decision.started.component] += 1
        for refusal in decision.refused:
            self._maker_of(refusal.pass_id).error = refusal.error
        for fetch in decision.fetches:
            claimed = self.planner.claims_on(fetch.slot)
            assert not claimed, f"slot {fetch.slot} is refilled under {claimed}"
            self.slots[fetch.slot] = fetch.block
            self.in_flight.append((fetch.slot, fetch.generation, False))
            if fetch.block in self.orders[COLLECTIVE]:
                self.gathers.append(fetch.block)
        for claim in decision.claims:
            maker = self._maker_of(claim.pass_id)
            if claim.serial == maker.serial:
                maker.told[claim.block] = claim

    def _maker_of(self, pass_id: int) -> Maker:
        return next(maker for maker in self.makers if maker.pass_id == pass_id)


class Ranks:
    """All ranks of a group; the test is their coordinator."""

    def __init__(self, seed: int, num_ranks: int = 0) -> None:
        self.draw = draw = random.Random(seed)
        num_blocks, num_local = draw.randint(1, 9), draw.randint(1, 4)
        self.orders = {COLLECTIVE: list(range(num_blocks)), LOCAL: list(range(100, 100 + num_local))}
        self.num_slots = draw.randint(1, min(4, num_blocks + num_local))
        self.ranks = [Rank(self.orders, self.num_slots, draw) for _ in range(num_ranks or draw.randint(2, 4))]
        self.num_waves = 0

    def add(self, rank: int, wave: WaveSignature | None, passes: Sequence[tuple[str, list[int]]]) -> Maker:
        place = self.ranks[rank]
        maker = Maker(len(place.makers) + 1, wave, list(passes))
        place.makers.append(maker)
        return maker

    def begin(self, signature: WaveSignature) -> None:
        self.num_waves += 1
        for rank in self.ranks:
            rank.waves.begin(self.num_waves, signature, [request.ticket for request in rank.waves.waiting()])
            rank.settle()

    def run(self, until_stuck: bool = True, num_steps: int | None = None) -> None:
        """Let things happen in any order until nothing can happen any more."""
        while num_steps is None or num_steps > 0:
            begun = min(len(rank.gathers) for rank in self.ranks)
            possible = [(rank, action) for rank in self.ranks for action in rank.actions(begun)]
            if not possible:
                return
            rank, action = self.draw.choice(possible)
            rank.act(action)
            num_steps = None if num_steps is None else num_steps - 1

    def check(self, num_walks: int) -> None:
        expected = self.orders[COLLECTIVE] * num_walks
        for rank in self.ranks:
            assert rank.gathers == expected
            assert rank.num_walks[COLLECTIVE] == num_walks
            assert rank.waves.progress().is_over
            assert not rank.in_flight


def signature(steps: int, passes_per_step: int = 1) -> WaveSignature:
    return WaveSignature(((COLLECTIVE, steps),), passes_per_step)


@pytest.mark.parametrize("seed", range(200))
def test_every_rank_fetches_the_same_blocks_in_the_same_order(seed: int) -> None:
    ranks = Ranks(seed)
    draw = ranks.draw
    wave = signature(draw.randint(1, 3), draw.choice((1, 2)))
    blocks = ranks.orders[COLLECTIVE]
    makers = []
    for rank in range(len(ranks.ranks)):
        for _ in range(draw.randint(0, 2)):
            local = [(LOCAL, ranks.orders[LOCAL])] * draw.randint(0, 2)
            passes = [(COLLECTIVE, [b for b in blocks if draw.random() < 0.9]) for _ in range(wave.num_walks)]
            makers.append(ranks.add(rank, wave, [*local, *passes, *local]))
    ranks.run()
    assert not any(rank.gathers for rank in ranks.ranks)  # nothing is fetched for a wave that is not agreed
    ranks.begin(wave)
    ranks.run()
    ranks.check(wave.num_walks)
    assert all(maker.gone and maker.error is None for maker in makers)


@pytest.mark.parametrize("seed", range(200))
def test_requests_that_are_cancelled_leave_their_rank_feeding(seed: int) -> None:
    ranks = Ranks(seed)
    draw = ranks.draw
    wave = signature(draw.randint(1, 4))
    makers = [
        (rank, ranks.add(rank, wave, [(COLLECTIVE, ranks.orders[COLLECTIVE])] * wave.num_walks))
        for rank in range(len(ranks.ranks))
        for _ in range(draw.randint(0, 2))
    ]
    ranks.run()
    ranks.begin(wave)
    for rank, maker in makers:
        if draw.random() < 0.6:
            ranks.run(num_steps=draw.randint(0, 40))
            ranks.ranks[rank].stop(maker)
    ranks.run()
    ranks.check(wave.num_walks)
    assert all(maker.gone for _, maker in makers)


@pytest.mark.parametrize("seed", range(200))
def test_a_wave_that_nobody_needs_any_more_ends_early_at_the_same_walk_everywhere(seed: int) -> None:
    ranks = Ranks(seed)
    draw = ranks.draw
    wave = signature(8)
    makers = [ranks.add(rank, wave, [(COLLECTIVE, ranks.orders[COLLECTIVE])] * 8) for rank in range(len(ranks.ranks))]
    ranks.run()
    ranks.begin(wave)
    ranks.run(num_steps=draw.randint(0, 60))
    for rank, maker in zip(ranks.ranks, makers, strict=True):
        rank.stop(maker)
    ranks.run(num_steps=draw.randint(0, 20))
    promises = []
    for rank in ranks.ranks:
        promises.append(rank.waves.hold())
        ranks.run(num_steps=draw.randint(0, 20))
    assert not any(rank.waves.progress().is_over for rank in ranks.ranks)  # until they agreed
    for rank in ranks.ranks:
        rank.waves.end_after(max(promises))
        rank.settle()
        ranks.run(num_steps=draw.randint(0, 20))
    ranks.run()
    ranks.check(max(promises))


@pytest.mark.parametrize("seed", range(100))
def test_a_block_that_would_have_to_be_gathered_again_is_refused_and_the_others_go_on(seed: int) -> None:
    ranks = Ranks(seed, num_ranks=2)
    blocks = ranks.orders[COLLECTIVE]
    wave = signature(2)
    wrong = ranks.add(0, wave, [(COLLECTIVE, [*blocks, blocks[0]])] * 2)
    right = ranks.add(1, wave, [(COLLECTIVE, blocks)] * 2)
    ranks.run()
    ranks.begin(wave)
    ranks.run()
    ranks.check(2)
    assert right.gone
    assert right.error is None
    if len(blocks) > ranks.num_slots:  # else the window may hold it still
        assert isinstance(wrong.error, OutOfTurnError)
    assert wrong.gone


def test_a_member_that_does_something_else_first_waits_for_the_end_of_the_wave_and_for_a_new_one() -> None:
    ranks = Ranks(3, num_ranks=2)
    wave = signature(2)
    blocks = ranks.orders[COLLECTIVE]
    maker = ranks.add(0, wave, [(COLLECTIVE, blocks), (LOCAL, ranks.orders[LOCAL]), (COLLECTIVE, blocks)])
    ranks.run()
    ranks.begin(wave)
    ranks.run()
    assert [request.ticket for request in ranks.ranks[0].waves.waiting()] == [maker.pass_id]
    ranks.begin(wave)
    ranks.run()
    assert maker.gone
    assert maker.error is None
    ranks.check(4)


def test_a_request_without_a_signature_is_told_so() -> None:
    ranks = Ranks(1, num_ranks=2)
    maker = ranks.add(0, None, [(COLLECTIVE, ranks.orders[COLLECTIVE])])
    ranks.run()
    assert isinstance(maker.error, SignatureMissingError)
    assert maker.gone


def test_a_wave_over_components_that_are_not_gathered_is_refused() -> None:
    ranks = Ranks(1, num_ranks=2)
    maker = ranks.add(0, WaveSignature(((LOCAL, 2),)), [(COLLECTIVE, ranks.orders[COLLECTIVE])])
    ranks.run()
    assert isinstance(maker.error, WaveComponentsError)
    assert maker.gone


def test_a_waiting_request_gets_the_error_that_it_is_refused_with() -> None:
    ranks = Ranks(1, num_ranks=2)
    maker = ranks.add(0, signature(2), [(COLLECTIVE, ranks.orders[COLLECTIVE])])
    ranks.run()
    (waiting,) = ranks.ranks[0].waves.waiting()
    ranks.ranks[0].waves.refuse(waiting.ticket, ValueError("other steps"))
    ranks.ranks[0].settle()
    ranks.run()
    assert isinstance(maker.error, ValueError)
    assert maker.gone
    assert not ranks.ranks[0].waves.waiting()


def test_an_answer_that_comes_late_is_not_taken_for_one_to_the_next_request_of_the_same_thread() -> None:
    ranks = Ranks(1, num_ranks=2)
    rank, blocks = ranks.ranks[0], ranks.orders[COLLECTIVE]
    first = ranks.add(0, signature(2), [(COLLECTIVE, blocks)] * 2)
    ranks.run()
    (said,) = rank.waves.waiting()
    rank.stop(first)
    following = ranks.add(0, signature(1), [(COLLECTIVE, blocks)])
    following.number = first.number
    ranks.run()
    (waiting,) = rank.waves.waiting()
    rank.waves.refuse(said.ticket, ValueError("of the first"))
    for other in ranks.ranks:
        other.waves.begin(1, signature(2), [said.ticket])
        other.settle()
    ranks.run()
    assert following.error is None
    assert rank.waves.progress().num_live == 0
    assert waiting.ticket != said.ticket
    assert [request.ticket for request in rank.waves.waiting()] == [waiting.ticket]


def test_a_request_that_ends_while_its_rank_walks_alone_is_no_member_of_the_wave_that_begins() -> None:
    ranks = Ranks(1, num_ranks=2)
    rank, blocks = ranks.ranks[0], ranks.orders[COLLECTIVE]
    ended = ranks.add(0, signature(2), [(COLLECTIVE, blocks)] * 2)
    rank.act("maker 0")
    (said,) = rank.waves.waiting()
    alone = ranks.add(0, None, [(LOCAL, ranks.orders[LOCAL])])
    other = ranks.add(1, signature(2), [(COLLECTIVE, blocks)] * 2)
    rank.act("maker 1")
    assert rank.num_walks[LOCAL] == 1
    rank.stop(ended)
    assert not rank.waves.waiting()
    ranks.ranks[1].act("maker 0")
    rank.waves.begin(1, signature(2), [said.ticket])
    ranks.ranks[1].waves.begin(1, signature(2), [request.ticket for request in ranks.ranks[1].waves.waiting()])
    for each in ranks.ranks:
        each.settle()
    ranks.run()
    assert alone.gone
    assert other.gone
    ranks.check(2)
