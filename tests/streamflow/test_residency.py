"""Which blocks stay on the device: within the budget, only those that may, and where they save most."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

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


def step_time(sizes: Sequence[float], compute: Sequence[float], residents: Collection[int]) -> float:
    """A step's time in the steady state: a link of one byte a second, a window of two slots."""
    link = done = 0.0
    in_slots: list[float] = []
    ends = []
    for _ in range(6):
        for block, nbytes in enumerate(sizes):
            if block not in residents:
                link = max(link, in_slots.pop(0) if len(in_slots) == 2 else 0.0) + nbytes
                done = max(done, link)
            done += compute[block]
            if block not in residents:
                in_slots.append(done)
        ends.append(done)
    return (ends[5] - ends[2]) / 3


def flux(px: int) -> tuple[list[float], list[float]]:
    """Bytes and floating-point operations of FLUX.1's 19 double and 38 single blocks, in units of a second each.

    340 million weights in a double block, half of them for each kind of tokens; 141 million in a single one; a width of
    3072; 512 tokens of text. 55 GB/s and 550 TFLOP/s, as measured on an H200.
    """
    tokens = (px // 16) ** 2 + 512
    attention = 4 * tokens**2 * 3072
    double = (680e6 / 55e9, (2 * tokens * 170e6 + attention) / 550e12)
    single = (283e6 / 55e9, (2 * tokens * 141e6 + attention) / 550e12)
    blocks = [double] * 19 + [single] * 38
    return [nbytes for nbytes, _ in blocks], [compute for _, compute in blocks]


PX = (512, 1024, 1280, 1408, 1536, 1664, 2048)


def ratio(px: int, budget_s: float) -> float:
    """The step's time with the residents of a budget, over that with as many bytes spread by number."""
    times, compute = flux(px)
    sizes = [round(time * 1e9) for time in times]
    spread: tuple[int, ...] = ()
    for count in range(len(sizes) + 1):
        more = chosen_of(sizes, count, None)
        spread = more if sum(sizes[block] for block in more) <= budget_s * 1e9 else spread
    chosen = chosen_of(sizes, None, round(budget_s * 1e9))
    return step_time(times, compute, chosen) / step_time(times, compute, spread)


@pytest.mark.parametrize("gigabytes", [1, 2, 3, 5, 8, 10, 12, 13, 16, 20])
def test_levelling_costs_next_to_nothing_anywhere(gigabytes: int) -> None:
    assert max(ratio(px, gigabytes / 55) for px in PX) <= 1.05


def test_levelling_saves_where_only_the_large_blocks_wait_for_the_link() -> None:
    assert ratio(1280, 8 / 55) <= 0.91
    assert ratio(1408, 5 / 55) <= 0.92
    assert ratio(1024, 13 / 55) <= 0.95
