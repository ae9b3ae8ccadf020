"""Which blocks stay on the device: within the budget, only those that may, and where they save most."""

from __future__ import annotations

import runpy
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.residency import choose_residents

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=20)


def chosen_of(sizes: Sequence[int], count: int | None, budget: int | None, *, spread: bool = True) -> tuple[int, ...]:
    return choose_residents(sizes, [True] * len(sizes), count=count, budget_bytes=budget, spread=spread)


@given(SIZES, st.data())
def test_they_are_eligible_in_order_and_within_number_and_bytes(sizes: list[int], data: st.DataObject) -> None:
    eligible = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    count = data.draw(st.none() | st.integers(0, len(sizes)))
    budget = data.draw(st.none() | st.integers(0, sum(sizes)))
    chosen = choose_residents(sizes, eligible, count=count, budget_bytes=budget, spread=data.draw(st.booleans()))
    assert list(chosen) == sorted(set(chosen))
    assert all(eligible[block] for block in chosen)
    assert count is None or len(chosen) <= count
    assert budget is None or sum(sizes[block] for block in chosen) <= budget
    if count is None and budget is None:
        assert chosen == ()


@given(SIZES, st.integers(0, 1000))
def test_what_a_budget_leaves_holds_no_other_block(sizes: list[int], budget: int) -> None:
    chosen = set(chosen_of(sizes, None, budget))
    left = budget - sum(sizes[block] for block in chosen)
    if len(set(sizes)) > 1:
        assert all(size > left for block, size in enumerate(sizes) if block not in chosen)
    if budget >= sum(sizes):
        assert len(chosen) == len(sizes)


def test_equal_blocks_are_spread_evenly_and_leading_ones_are_the_first() -> None:
    assert chosen_of([10] * 9, 3, None) == (1, 4, 7)
    assert chosen_of([10] * 9, None, 35) == (1, 4, 7)
    assert chosen_of([10] * 9, 9, 35) == (1, 4, 7)
    assert chosen_of([10, 20, 10], 2, None, spread=False) == (0, 1)
    assert chosen_of([10, 20, 10], None, 30, spread=False) == (0, 1)


def test_a_number_is_spread_whatever_the_sizes() -> None:
    assert chosen_of([20] * 3 + [10] * 6, 3, None) == (1, 4, 7)


def test_a_budget_goes_to_large_blocks_evenly_until_they_stream_no_more_than_the_others() -> None:
    sizes = [24] * 8 + [10] * 16
    assert chosen_of(sizes, None, 24 * 2) == (2, 6)
    assert set(chosen_of(sizes, None, 24 * 4)) <= set(range(8))
    much = chosen_of(sizes, None, 24 * 6 + 10 * 8)
    assert 0 < sum(block < 8 for block in much) < 8
    assert 0 < sum(block >= 8 for block in much) < 16


@pytest.mark.parametrize("may_stay", [True, False])
def test_a_block_that_has_to_stream_does_not_draw_the_others_residents_together(may_stay: bool) -> None:
    sizes, eligible = [10, 11] * 20 + [1_000_000], [True] * 40 + [may_stay]
    chosen = choose_residents(sizes, eligible, count=None, budget_bytes=84, spread=True)
    assert len(chosen) == 8
    assert max(later - before for before, later in zip((-1, *chosen), (*chosen, 40), strict=True)) <= 8


def test_a_thousand_blocks_are_chosen_from_in_no_time() -> None:
    """The loop of the host waits for it, and other ranks for that."""
    sizes = [680] * 333 + [283] * 667
    started = time.perf_counter()
    chosen = chosen_of(sizes, None, sum(sizes) // 3)
    assert time.perf_counter() - started < 3  # a hundred times what it takes
    assert 0 <= sum(sizes) // 3 - sum(sizes[block] for block in chosen) < 283


# What it is for, by a model of the walk


_MODEL = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "readings" / "window_in_bytes.py"))
blocks_of, step_time = _MODEL["blocks_of"], _MODEL["step_time"]

PX = (512, 1024, 1280, 1408, 1536, 1664, 2048)


def ratio(px: int, budget_bytes: float) -> float:
    """The step's time with the residents of a budget, over that with as many bytes spread by number."""
    blocks = blocks_of(px)
    sizes = [round(nbytes) for nbytes, _ in blocks]
    spread: tuple[int, ...] = ()
    for count in range(len(sizes) + 1):
        more = chosen_of(sizes, count, None)
        spread = more if sum(sizes[block] for block in more) <= budget_bytes else spread
    chosen = chosen_of(sizes, None, round(budget_bytes))
    before: float = step_time(blocks, slots=2, residents=spread)
    after: float = step_time(blocks, slots=2, residents=chosen)
    return after / before


@pytest.mark.parametrize("gigabytes", [1, 2, 3, 5, 8, 10, 12, 13, 16, 20])
def test_levelling_costs_next_to_nothing_anywhere(gigabytes: int) -> None:
    assert max(ratio(px, gigabytes * 1e9) for px in PX) <= 1.05


def test_levelling_saves_where_only_the_large_blocks_wait_for_the_link() -> None:
    assert ratio(1280, 8e9) <= 0.91
    assert ratio(1408, 5e9) <= 0.92
    assert ratio(1024, 13e9) <= 0.95
