"""Which pages of which mappings are registered, and in which ranges. Pure: no torch, no clock.

Registration works on whole pages, and a copy must not cross from one registered range into another: the driver refuses
it. So ranges share no page, and whoever copies cuts at their ends (`RegistrationPlan.runs`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import attrs


@attrs.frozen(order=True)
class Extent:
    """``nbytes`` from ``offset_bytes`` on of a mapping, given by its index: what is to be readable by the device."""

    mapping: int
    offset_bytes: int
    nbytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.nbytes


@attrs.frozen
class RegistrationPlan:
    """Ranges of whole pages, ascending and disjoint, that hold every extent that was planned for."""

    ranges: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges: what is page-locked in the end."""
        return sum(pages.nbytes for pages in self.ranges)

    def runs(self, extent: Extent) -> tuple[Extent, ...]:
        """``extent``, cut where ranges end; each run lies in one range.

        :raises ValueError: if it is not inside the ranges.
        """
        runs = []
        start = extent.offset_bytes
        while start < extent.end_bytes:
            index = bisect_right(self.ranges, (extent.mapping, start), key=_start) - 1
            pages = self.ranges[index] if index >= 0 else None
            if pages is None or pages.mapping != extent.mapping or pages.end_bytes <= start:
                raise ValueError(f"{extent} is not inside the {len(self.ranges)} ranges of the plan")
            end = min(extent.end_bytes, pages.end_bytes)
            runs.append(Extent(extent.mapping, start, end - start))
            start = end
        return tuple(runs)


def plan_registration(extents: Iterable[Extent], *, piece_bytes: int, page_bytes: int) -> RegistrationPlan:
    """The union of the extents' pages, coalesced within each mapping, in ranges of at most ``piece_bytes``.

    ``piece_bytes`` is rounded down to whole pages, but to one page at least. A range ends between two extents wherever
    one of its page boundaries does, so that no more extents are cut than have to be.
    """
    piece_bytes = max(page_bytes, piece_bytes - piece_bytes % page_bytes)
    wanted = sorted(extent for extent in extents if extent.nbytes)
    ranges: list[Extent] = []
    for group in _coalesced(wanted, page_bytes):
        ranges += _cut(group, piece_bytes, page_bytes)
    return RegistrationPlan(tuple(ranges))


def _start(pages: Extent) -> tuple[int, int]:
    return (pages.mapping, pages.offset_bytes)


@attrs.define
class _Group:
    """Extents (ascending) whose pages follow each other without a gap, and these pages."""

    pages: Extent
    extents: list[Extent]


def _coalesced(extents: Sequence[Extent], page_bytes: int) -> Iterator[_Group]:
    current: _Group | None = None
    for extent in extents:
        pages = _whole_pages(extent, page_bytes)
        if current is None or pages.mapping != current.pages.mapping or pages.offset_bytes > current.pages.end_bytes:
            if current is not None:
                yield current
            current = _Group(pages, [])
        end = max(current.pages.end_bytes, pages.end_bytes)
        current.pages = attrs.evolve(current.pages, nbytes=end - current.pages.offset_bytes)
        current.extents.append(extent)
    if current is not None:
        yield current


def _whole_pages(extent: Extent, page_bytes: int) -> Extent:
    start = extent.offset_bytes - extent.offset_bytes % page_bytes
    end = -(-extent.end_bytes // page_bytes) * page_bytes
    return Extent(extent.mapping, start, end - start)


def _cut(group: _Group, piece_bytes: int, page_bytes: int) -> Iterator[Extent]:
    clean = _clean_boundaries(group.extents, page_bytes)
    start, end = group.pages.offset_bytes, group.pages.end_bytes
    while end - start > piece_bytes:
        index = bisect_right(clean, start + piece_bytes) - 1
        cut = clean[index] if index >= 0 and clean[index] > start else start + piece_bytes
        yield Extent(group.pages.mapping, start, cut - start)
        start = cut
    yield Extent(group.pages.mapping, start, end - start)


def _clean_boundaries(extents: Sequence[Extent], page_bytes: int) -> list[int]:
    """Page boundaries between neighbours that neither of them crosses, ascending."""
    ends = itertools.accumulate((extent.end_bytes for extent in extents), max)
    found = []
    for end, following in zip(ends, extents[1:], strict=False):
        boundary = -(-end // page_bytes) * page_bytes
        if boundary <= following.offset_bytes:
            found.append(boundary)
    return found
