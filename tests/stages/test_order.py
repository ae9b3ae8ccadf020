"""The forecast of visits: positions, what comes next, and what is learned."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.order import BlockOrder

VISITS = st.lists(st.integers(0, 5), max_size=12)
POSITIONS = st.integers(0, 13)


@pytest.mark.parametrize(
    ("block", "position", "expected"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 2), (2, 1, 3), (0, 3, 0), (2, 4, 3), (2, 9, 3), (7, 2, 2)],
)
def test_the_place_of_a_block_is_the_next_one_else_its_first_and_unknown_blocks_stay_put(
    block: int, position: int, expected: int
) -> None:
    assert BlockOrder((0, 1, 0, 2)).position_before(block, position) == expected


@pytest.mark.parametrize(("block", "position", "expected"), [(0, 0, 1), (0, 1, 3), (0, 3, 1), (2, 0, 4), (7, 2, 2)])
def test_after_a_block_a_pass_stands_behind_it(block: int, position: int, expected: int) -> None:
    assert BlockOrder((0, 1, 0, 2)).position_after(block, position) == expected


def test_a_block_comes_until_its_last_visit() -> None:
    order = BlockOrder((0, 1, 0, 2))
    assert [order.comes_after(0, position) for position in range(5)] == [True, True, True, False, False]
    assert not order.comes_after(7, 0)


@pytest.mark.parametrize(
    ("position", "num_blocks", "expected"),
    [(0, 2, [0, 1]), (1, 2, [1, 0]), (1, 3, [1, 0, 2]), (3, 2, [2, 0]), (4, 2, [0, 1]), (9, 9, [0, 1, 2]), (0, 0, [])],
)
def test_what_is_ahead_is_distinct_and_goes_on_into_the_next_pass(
    position: int, num_blocks: int, expected: list[int]
) -> None:
    assert BlockOrder((0, 1, 0, 2)).ahead(position, num_blocks) == expected


@given(visits=VISITS, position=POSITIONS, num_blocks=st.integers(0, 8))
def test_ahead_are_all_blocks_once_by_when_they_come(visits: list[int], position: int, num_blocks: int) -> None:
    ahead = BlockOrder(visits).ahead(position, num_blocks)
    cycle = visits[position:] + visits
    assert len(ahead) == min(num_blocks, len(set(visits)))
    assert ahead == sorted(set(ahead), key=cycle.index)
    assert all(block in ahead for block in cycle[: cycle.index(ahead[-1])]) if ahead else True


@given(visits=VISITS, position=POSITIONS, block=st.integers(0, 6))
def test_positions_agree_with_each_other(visits: list[int], position: int, block: int) -> None:
    order = BlockOrder(visits)
    before = order.position_before(block, position)
    if block not in visits:
        assert before == order.position_after(block, position) == position
        return
    assert visits[before] == block
    assert order.position_after(block, position) == before + 1
    assert (before >= position) == order.comes_after(block, position) == (block in visits[position:])


def learned(first: Sequence[int], *passes: Sequence[int]) -> tuple[int, ...]:
    order = BlockOrder(first)
    for visited in passes:
        order.learn(visited)
    return order.visits


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        pytest.param([(0, 1, 2, 3)], (0, 1, 2, 3), id="as foreseen"),
        pytest.param([(0, 3)], (0, 1, 2, 3), id="skips once"),
        pytest.param([(0, 3), (0, 3)], (0, 3), id="skips always"),
        pytest.param([(0, 3), (0, 1, 2, 3), (0, 3)], (0, 1, 2, 3), id="skips in turn"),
        pytest.param([(0, 3), (0, 2), (0, 3)], (0, 1, 2, 3), id="skips this and that"),
        pytest.param([(0, 3), (0, 3), (0, 1, 2, 3)], (0, 1, 2, 3), id="skips no more"),
        pytest.param([(0, 2, 1, 3)], (0, 2, 1, 3), id="another order"),
        pytest.param([(0, 1, 2, 2, 3)], (0, 1, 2, 2, 3), id="a block twice"),
        pytest.param([(), ()], (0, 1, 2, 3), id="nothing ran"),
        pytest.param([(0, 3), (), (0, 3)], (0, 1, 2, 3), id="nothing ran between"),
    ],
)
def test_what_is_learned(passes: list[tuple[int, ...]], expected: tuple[int, ...]) -> None:
    assert learned((0, 1, 2, 3), *passes) == expected


@given(first=VISITS, visited=VISITS)
def test_two_passes_that_do_the_same_are_the_forecast_for_the_third(first: list[int], visited: list[int]) -> None:
    assert learned(first, visited, visited) == tuple(visited or first)
