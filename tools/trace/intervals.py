"""Stretches of time and their algebra. Pure: no torch, no clock.

A stretch is (begin, end) with begin <= end; a list of them that `merged` returned is sorted and without overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Stretch = tuple[float, float]


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same moments, as stretches in order that do not touch; empty ones are gone."""
    result: list[Stretch] = []
    for begin, end in sorted(stretch for stretch in stretches if stretch[1] > stretch[0]):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def total(stretches: Iterable[Stretch]) -> float:
    """How long they are together; overlaps count twice."""
    return sum(end - begin for begin, end in stretches)


def clipped(stretches: Iterable[Stretch], begin: float, end: float) -> list[Stretch]:
    """What of them lies between ``begin`` and ``end``."""
    cut = ((max(begin, first), min(end, last)) for first, last in stretches)
    return [stretch for stretch in cut if stretch[1] > stretch[0]]


def common(one: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """The moments in both; both are merged, and so is the result."""
    result: list[Stretch] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if end > begin:
            result.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return result


def without(stretch: Stretch, taken: Iterable[Stretch]) -> list[Stretch]:
    """The moments of ``stretch`` that are in none of ``taken``, which is merged."""
    result: list[Stretch] = []
    begin, end = stretch
    for first, last in clipped(taken, begin, end):
        if first > begin:
            result.append((begin, first))
        begin = last
    return [*result, (begin, end)] if end > begin else result
