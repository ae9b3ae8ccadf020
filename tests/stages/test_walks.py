"""The walk planner, case by case: messages arrive at once, fetches take no time. `test_walks_races.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from streamflow.stages.decisions import Claim, Decision, Fetch
from streamflow.stages.returns import Returns
from streamflow.stages.walk_sources import ImmediateWalks, WaitingPass, WalkChoice, WalkSource, WithoutWaves
from streamflow.stages.walks import WalkPlanner

FULL = tuple(range(9))
SIZES = [(num_blocks, num_slots) for num_blocks in range(1, 10) for num_slots in range(1, 5)]


@attrs.define
class Taken:
    """A pass that is under way: what it was told, and how often it had to ask."""

    pass_id: int
    told: dict[int, Claim] = attrs.field(factory=dict)
    serial: int = 0
    num_wants: int = 0


class Desk:
    """A planner, and passes that do one thing at a time."""

    def __init__(self, order: Sequence[int], num_slots: int, source: WalkSource | None = None) -> None:
        self.planner = WalkPlanner({"toy": order}, num_slots, source)
        self.passes: dict[int, Taken] = {}
        self.fetches: list[Fetch] = []
        self.walks: list[tuple[int, ...]] = []
        self.settle()

    def settle(self) -> None:
        """Decide until nothing follows any more."""
        while True:
            decision = self.planner.decide()
            self._note(decision)
            if not decision.fetches:
                return
            for fetch in decision.fetches:
                self.planner.fetched(fetch.slot, fetch.generation)

    def _note(self, decision: Decision) -> None:
        if decision.started is not None:
            self.walks.append(decision.started.pass_ids)
        self.fetches += decision.fetches
        for claim in decision.claims:
            taken = self.passes[claim.pass_id]
            if claim.serial == taken.serial:
                taken.told[claim.block] = claim

    def begin(self, pass_id: int) -> Taken:
        self.passes[pass_id] = Taken(pass_id)
        self.planner.join(pass_id, "toy")
        self.settle()
        return self.passes[pass_id]

    def want(self, pass_id: int, block: int) -> None:
        taken = self.passes[pass_id]
        taken.serial += 1
        taken.num_wants += 1
        taken.told.clear()
        self.planner.want(pass_id, block, taken.serial)
        self.settle()

    def enter(self, pass_id: int, block: int) -> tuple[int, ...]:
        """Enter the block, having asked if need be; returns the blocks passed by."""
        told = self.passes[pass_id].told
        if block not in told:
            self.want(pass_id, block)
        assert block in told, f"pass {pass_id} waits for block {block} in vain"
        claim = told.pop(block)
        assert self.planner.slot_of(block) == claim.slot
        passed_by = tuple(other for other, behind in told.items() if behind.rank < claim.rank)
        for other in passed_by:
            del told[other]
        return passed_by

    def visit(self, pass_id: int, block: int) -> None:
        self.planner.left(pass_id, block, self.enter(pass_id, block))
        self.settle()

    def end(self, pass_id: int, *, completed: bool = True) -> None:
        self.planner.end(pass_id, completed=completed)
        self.settle()

    def run(self, pass_id: int, visits: Sequence[int], *, completed: bool = True) -> tuple[list[Fetch], int]:
        """One whole pass; returns the fetches that it led to, and how often it had to ask."""
        before = len(self.fetches)
        taken = self.begin(pass_id)
        for block in visits:
            self.visit(pass_id, block)
        self.end(pass_id, completed=completed)
        return self.fetches[before:], taken.num_wants

    def num_claims(self) -> int:
        return sum(len(self.planner.claims_on(fetch)) for fetch in {fetch.slot for fetch in self.fetches})


def blocks_of(fetches: Sequence[Fetch]) -> list[int]:
    return [fetch.block for fetch in fetches]


# Steady state


@pytest.mark.parametrize(("num_blocks", "num_slots"), SIZES)
def test_passes_in_order_fetch_each_block_once_a_walk_or_once_and_for_all_and_never_ask(
    num_blocks: int, num_slots: int
) -> None:
    desk = Desk(range(num_blocks), num_slots)
    for pass_id in range(1, 6):
        fetches, num_wants = desk.run(pass_id, range(num_blocks))
        assert num_wants == 0
        assert not any(fetch.on_demand for fetch in fetches)
        assert sorted(blocks_of(fetches)) == (list(range(num_blocks)) if num_slots < num_blocks else [])
    assert len(desk.fetches) == (5 * num_blocks + num_slots if num_slots < num_blocks else num_blocks)


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_the_next_blocks_are_on_their_way_while_one_runs_and_the_first_ones_after_the_last(num_slots: int) -> None:
    desk = Desk(FULL, num_slots)
    desk.begin(1)
    for block in FULL:
        desk.enter(1, block)
        ahead = [(block + i) % len(FULL) for i in range(num_slots)]
        assert [other for other in FULL if desk.planner.slot_of(other) is not None] == sorted(ahead)
        desk.planner.left(1, block)
        desk.settle()


def test_slots_beyond_the_number_of_blocks_stay_empty() -> None:
    desk = Desk((5, 3), 4)
    desk.run(1, (5, 3))
    assert {(fetch.block, fetch.slot) for fetch in desk.fetches} == {(5, 0), (3, 1)}


def test_generations_count_the_refills_of_a_slot_and_each_names_what_it_drops() -> None:
    desk = Desk((0, 1), 1)
    desk.run(1, (0, 1))
    assert [(f.block, f.slot, f.generation, f.drops) for f in desk.fetches] == [
        (0, 0, 1, None),
        (1, 0, 2, 0),
        (0, 0, 3, 1),
    ]


def test_without_blocks_passes_come_and_go() -> None:
    desk = Desk((), 0)
    desk.run(1, ())
    desk.run(2, ())
    assert desk.walks == [(1,), (2,)]
    assert desk.fetches == []


# The order is a forecast


def test_the_next_pass_begins_with_block_0_although_the_last_one_evicted_it() -> None:
    desk = Desk(FULL, 1)
    desk.begin(1)
    for block in FULL[:-1]:
        desk.visit(1, block)
    desk.enter(1, FULL[-1])
    assert desk.planner.slot_of(0) is None
    desk.end(1, completed=False)
    desk.run(2, FULL)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_step_caches_that_run_only_first_and_last_blocks_cost_a_window_and_are_not_learned(num_slots: int) -> None:
    desk = Desk(FULL, num_slots)
    desk.run(1, FULL)
    for pass_id in range(2, 10, 2):
        fetches, _ = desk.run(pass_id, (0, 8))
        assert [f.block for f in fetches if f.on_demand] == [8]
        assert len(fetches) <= num_slots + 2
        fetches, num_wants = desk.run(pass_id + 1, FULL)
        assert num_wants == 0
        assert len(fetches) == len(FULL)
        assert desk.planner.order_of("toy") == FULL


def test_guided_passes_that_run_all_blocks_and_a_subset_in_turn_do_not_unlearn_the_order() -> None:
    desk = Desk(FULL, 2)
    for pass_id in range(1, 9, 2):
        assert desk.run(pass_id, FULL)[1] == 0
        desk.run(pass_id + 1, (0, 1, 2, 5, 6))
        assert desk.planner.order_of("toy") == FULL


def test_a_model_that_always_skips_is_learned_after_two_passes() -> None:
    desk = Desk(FULL, 2)
    visits = (0, 3, 6)
    assert desk.run(1, visits)[1] == 2
    assert desk.planner.order_of("toy") == FULL
    desk.run(2, visits)
    assert desk.planner.order_of("toy") == visits
    for pass_id in (3, 4):
        fetches, num_wants = desk.run(pass_id, visits)
        assert (sorted(blocks_of(fetches)), num_wants) == (list(visits), 0)


def test_a_block_passed_by_gives_its_slot_back_at_once() -> None:
    desk = Desk(FULL, 3)
    desk.begin(1)
    desk.visit(1, 0)
    assert desk.enter(1, 2) == (1,)
    desk.planner.left(1, 2, passed_by=(1,))
    desk.settle()
    assert [block for block in FULL if desk.planner.slot_of(block) is not None] == [3, 4, 5]


def test_what_the_forecast_lacks_is_learned_at_once() -> None:
    desk = Desk(FULL, 2)
    backwards = tuple(reversed(FULL))
    assert desk.run(1, backwards)[1] == len(FULL)
    assert desk.planner.order_of("toy") == backwards
    assert desk.run(2, backwards)[1] == 0


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_blocks_that_run_twice_in_a_pass_are_fetched_for_each_run_and_then_foreseen(num_slots: int) -> None:
    visits = (0, 1, 0, 2, 2, 3)
    desk = Desk((0, 1, 2, 3), num_slots)
    desk.run(1, visits)
    assert desk.planner.order_of("toy") == visits
    fetches, num_wants = desk.run(2, visits)
    assert num_wants == 0
    assert not any(fetch.on_demand for fetch in fetches)
    assert desk.num_claims() == 0


def test_a_pass_that_failed_teaches_nothing_and_leaves_a_clean_window() -> None:
    desk = Desk(FULL, 2)
    for pass_id in (1, 2):
        desk.begin(pass_id)
        desk.visit(pass_id, 0)
        desk.visit(pass_id, 7)
        desk.enter(pass_id, 3)
        desk.end(pass_id, completed=False)
        assert desk.planner.order_of("toy") == FULL
        assert desk.num_claims() == 0
    assert desk.run(3, FULL)[1] == 0


def test_a_fetch_is_on_demand_only_for_a_block_that_was_not_among_the_next() -> None:
    planner = WalkPlanner({"toy": FULL}, 2)
    planner.join(1, "toy")
    planner.decide()
    planner.want(1, 1, serial=1)
    for slot in (0, 1):
        planner.fetched(slot, generation=1)
    assert planner.decide().fetches == (Fetch(2, 0, 2, drops=0, on_demand=False),)
    planner.left(1, 1)
    planner.want(1, 7, serial=2)
    planner.fetched(0, generation=2)
    assert [(f.block, f.on_demand) for f in planner.decide().fetches] == [(7, True), (8, False)]


# Several passes


@pytest.mark.parametrize(("num_blocks", "num_slots"), SIZES)
def test_a_fast_pass_and_a_slow_one_share_every_fetch(num_blocks: int, num_slots: int) -> None:
    desk = Desk(range(num_blocks), num_slots, ImmediateWalks(min_passes=2))
    for walk in range(3):
        before = len(desk.fetches)
        slow, fast = 2 * walk + 1, 2 * walk + 2
        desk.begin(slow)
        desk.begin(fast)
        reached = 0
        for block in range(num_blocks):
            desk.enter(slow, block)
            while reached < num_blocks and reached in desk.passes[fast].told:
                desk.visit(fast, reached)
                reached += 1
            if reached < num_blocks:
                desk.want(fast, reached)
            assert reached <= block + num_slots
            desk.planner.left(slow, block)
            desk.settle()
        for block in range(reached, num_blocks):
            desk.visit(fast, block)
        desk.end(fast)
        desk.end(slow)
        assert sorted(blocks_of(desk.fetches[before:])) == (list(range(num_blocks)) if num_slots < num_blocks else [])


def test_a_slow_pass_that_asks_for_the_block_it_came_to_does_not_lose_it_to_one_that_waits_longer() -> None:
    desk = Desk((0, 1, 2, 3), 1, ImmediateWalks(min_passes=2))
    desk.begin(1)
    desk.begin(2)
    desk.visit(1, 0)
    desk.want(1, 1)
    desk.want(2, 0)  # its message was on the way when it looked
    assert desk.planner.slot_of(0) == 0
    desk.visit(2, 0)
    assert blocks_of(desk.fetches) == [0, 1]


def test_a_block_out_of_turn_goes_first_to_whom_it_was_promised_first() -> None:
    desk = Desk(FULL, 1, ImmediateWalks(min_passes=2))
    desk.begin(1)
    desk.begin(2)
    desk.enter(1, 0)
    desk.want(2, 7)
    desk.planner.left(1, 0)
    desk.want(1, 5)
    assert 7 in desk.passes[2].told
    desk.visit(2, 7)
    assert 5 in desk.passes[1].told
    assert [(f.block, f.on_demand) for f in desk.fetches] == [(0, False), (7, True), (5, True)]


def test_a_pass_that_waits_holds_no_slot_that_others_wait_for() -> None:
    desk = Desk((0, 1, 2), 1, ImmediateWalks(min_passes=2))
    desk.begin(1)
    desk.begin(2)
    desk.want(1, 2)
    desk.visit(2, 0)
    passed_by = desk.enter(1, 2)
    desk.want(2, 1)
    assert desk.planner.claims_on(0) == {1}
    desk.planner.left(1, 2, passed_by)
    desk.settle()
    desk.visit(2, 1)


def test_a_pass_is_not_told_of_blocks_far_ahead_whose_slot_it_would_keep_for_long() -> None:
    desk = Desk(FULL, 2, ImmediateWalks(min_passes=2))
    desk.begin(1)
    desk.begin(2)
    desk.want(1, 7)
    desk.visit(2, 0)
    assert desk.planner.claims_on(0) == {1}
    assert set(desk.passes[2].told) == {1}
    desk.visit(1, 7)
    assert set(desk.passes[2].told) == {1, 2}


def test_a_pass_that_comes_late_waits_for_the_next_walk_and_is_told_of_nothing_until_then() -> None:
    desk = Desk(FULL, 2)
    desk.begin(1)
    late = desk.begin(2)
    desk.want(2, 0)
    assert (desk.walks, late.told) == ([(1,)], {})
    for block in FULL:
        desk.visit(1, block)
    assert late.told == {}
    desk.end(1)
    assert desk.walks == [(1,), (2,)]
    for block in FULL:
        desk.visit(2, block)
    assert late.num_wants == 1


def test_walks_of_at_least_two_passes_start_with_the_second_and_end_with_the_last() -> None:
    desk = Desk(FULL, 2, ImmediateWalks(min_passes=2))
    assert desk.begin(1).told == {}
    desk.begin(2)
    desk.begin(3)
    assert desk.walks == [(1, 2)]
    desk.end(1)
    desk.begin(4)
    assert desk.walks == [(1, 2)]
    desk.end(2)
    assert desk.walks == [(1, 2), (3, 4)]
    assert desk.planner.num_walks == 2


def test_a_pass_that_ends_before_its_walk_began_is_in_none() -> None:
    desk = Desk(FULL, 2, ImmediateWalks(min_passes=2))
    desk.begin(1)
    desk.end(1, completed=False)
    desk.begin(2)
    assert desk.walks == []
    desk.begin(3)
    assert desk.walks == [(2, 3)]


def test_a_walk_source_chooses_who_walks() -> None:
    class NewestFirst(WithoutWaves):
        def next_walk(self, waiting: Sequence[WaitingPass], returns: Returns, now: float) -> WalkChoice:
            return WalkChoice((waiting[-1].pass_id,) if len(waiting) >= 2 else ())

        def late_joins(self, waiting: Sequence[WaitingPass], component: str, num_walking: int) -> tuple[int, ...]:
            return ()

    desk = Desk(FULL, 2, NewestFirst())
    for pass_id in (1, 2, 3):
        desk.begin(pass_id)
    desk.end(2)
    assert desk.walks == [(2,), (3,)]


# What does not belong


def test_a_fetch_of_an_older_generation_makes_nothing_ready() -> None:
    planner = WalkPlanner({"toy": (0, 1)}, 1)
    planner.join(1, "toy")
    planner.decide()
    planner.fetched(0, generation=0)
    assert planner.decide().claims == ()
    planner.fetched(0, generation=1)
    assert [claim.block for claim in planner.decide().claims] == [0]


def test_what_a_pass_says_after_its_end_changes_nothing() -> None:
    desk = Desk(FULL, 2)
    desk.run(1, FULL)
    before = len(desk.fetches)
    desk.planner.want(1, 5, serial=9)
    desk.planner.left(1, 5)
    desk.planner.end(1, completed=True)
    desk.settle()
    assert len(desk.fetches) == before
    assert desk.planner.order_of("toy") == FULL


def test_a_block_that_is_not_streamed_is_refused() -> None:
    desk = Desk(FULL, 2)
    desk.begin(1)
    with pytest.raises(KeyError):
        desk.planner.want(1, 9, serial=1)


@pytest.mark.parametrize("num_slots", [-1, 0])
def test_blocks_without_slots_are_refused_with_the_numbers(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"3 blocks .* the window has {num_slots} slots"):
        WalkPlanner({"toy": (0, 1, 2)}, num_slots)
