"""The algebra of stretches: against sets of whole moments."""

from __future__ import annotations

import itertools

import hypothesis
from hypothesis import strategies as st

from streamflow.tools.trace.intervals import Stretch, clipped, common, merged, total, without

STRETCH = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (float(min(pair)), float(max(pair))))
STRETCHES = st.lists(STRETCH, max_size=8)


def moments(stretches: list[Stretch]) -> set[int]:
    """The unit steps inside."""
    return {step for begin, end in stretches for step in range(int(begin), int(end))}


def is_merged(stretches: list[Stretch]) -> bool:
    return all(begin < end for begin, end in stretches) and all(
        one[1] < other[0] for one, other in itertools.pairwise(stretches)
    )


@hypothesis.given(STRETCHES)
def test_merging_keeps_the_moments(stretches: list[Stretch]) -> None:
    result = merged(stretches)
    assert moments(result) == moments(stretches)
    assert is_merged(result)
    assert total(result) == len(moments(stretches))


@hypothesis.given(STRETCHES, STRETCHES)
def test_what_two_have_in_common(one: list[Stretch], other: list[Stretch]) -> None:
    result = common(merged(one), merged(other))
    assert moments(result) == moments(one) & moments(other)


@hypothesis.given(STRETCHES, STRETCH)
def test_clipping_and_taking_away_share_a_stretch(stretches: list[Stretch], window: Stretch) -> None:
    inside, outside = clipped(merged(stretches), *window), without(window, merged(stretches))
    assert moments(inside) == moments(stretches) & moments([window])
    assert moments(outside) == moments([window]) - moments(stretches)
    assert total(inside) + total(outside) == window[1] - window[0]
