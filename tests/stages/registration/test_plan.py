"""Planning of registrations: every byte is in a range, no page in two, and no more is cut than has to be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.registration.plan import Extent, RegistrationPlan, plan_registration

PAGE = 16

extents = st.lists(
    st.builds(Extent, st.integers(0, 2), st.integers(0, 400), st.integers(0, 150)), min_size=0, max_size=12
)
piece_sizes = st.integers(1, 300)


def planned(wanted: list[Extent], piece_bytes: int) -> RegistrationPlan:
    return plan_registration(wanted, piece_bytes=piece_bytes, page_bytes=PAGE)


def pages_of(extent: Extent) -> set[tuple[int, int]]:
    if not extent.nbytes:
        return set()
    return {(extent.mapping, page) for page in range(extent.offset_bytes // PAGE, -(-extent.end_bytes // PAGE))}


@given(extents, piece_sizes)
def test_exactly_the_pages_that_are_wanted_are_registered_each_once(wanted: list[Extent], piece: int) -> None:
    plan = planned(wanted, piece)
    registered = [page for pages in plan.ranges for page in pages_of(pages)]
    assert len(registered) == len(set(registered))
    assert set(registered) == set().union(*map(pages_of, wanted))
    assert plan.nbytes == len(registered) * PAGE


@given(extents, piece_sizes)
def test_ranges_are_whole_pages_in_order_and_no_larger_than_a_piece(wanted: list[Extent], piece: int) -> None:
    ranges = planned(wanted, piece).ranges
    assert list(ranges) == sorted(ranges)
    for pages in ranges:
        assert pages.offset_bytes % PAGE == pages.nbytes % PAGE == 0
        assert 0 < pages.nbytes <= max(PAGE, piece)


@given(extents)
def test_with_room_enough_there_is_one_range_for_each_run_of_pages(wanted: list[Extent]) -> None:
    ranges = planned(wanted, 1 << 20).ranges
    for left, right in itertools.pairwise(ranges):
        assert left.mapping != right.mapping or left.end_bytes < right.offset_bytes


@given(extents, piece_sizes)
def test_runs_are_the_extent_cut_at_the_ends_of_ranges(wanted: list[Extent], piece: int) -> None:
    plan = planned(wanted, piece)
    for extent in wanted:
        runs = plan.runs(extent)
        assert [run.offset_bytes for run in runs] == [extent.offset_bytes, *(run.end_bytes for run in runs)][
            : len(runs)
        ]
        assert sum(run.nbytes for run in runs) == extent.nbytes
        for run in runs:
            (home,) = [pages for pages in plan.ranges if pages_of(run) <= pages_of(pages)]
            assert run.end_bytes == extent.end_bytes or run.end_bytes == home.end_bytes


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(6, 20))
def test_extents_on_pages_of_their_own_are_never_cut(num_pages: list[int], pages_in_piece: int) -> None:
    """As the images of a published artifact are: one copy for each."""
    wanted, offset = [], 0
    for count in num_pages:
        wanted.append(Extent(0, offset, count * PAGE - 3))
        offset += count * PAGE
    plan = planned(wanted, pages_in_piece * PAGE)
    assert all(len(plan.runs(extent)) == 1 for extent in wanted)


def test_adjacent_mappings_are_kept_apart() -> None:
    assert planned([Extent(0, 0, 32), Extent(1, 32, 32)], 1 << 20).ranges == (Extent(0, 0, 32), Extent(1, 32, 32))


def test_tensors_that_share_pages_have_them_registered_once() -> None:
    plan = planned([Extent(0, 5, 20), Extent(0, 25, 3), Extent(0, 28, 40)], 1 << 20)
    assert plan.ranges == (Extent(0, 0, 80),)


def test_a_piece_ends_between_two_tensors_where_it_can() -> None:
    wanted = [Extent(0, 0, 48), Extent(0, 48, 16), Extent(0, 64, 64)]
    assert planned(wanted, 80).ranges == (Extent(0, 0, 64), Extent(0, 64, 64))
    assert planned([Extent(0, 0, 160)], 64).ranges == (Extent(0, 0, 64), Extent(0, 64, 64), Extent(0, 128, 32))


@pytest.mark.parametrize("extent", [Extent(0, 100, 1), Extent(1, 0, 1), Extent(0, 30, 3)])
def test_runs_of_what_is_not_registered_are_an_error(extent: Extent) -> None:
    with pytest.raises(ValueError, match="is not inside the 1 ranges"):
        planned([Extent(0, 0, 20)], 1 << 20).runs(extent)
