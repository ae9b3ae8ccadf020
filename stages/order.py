"""The forecast of a pass's block visits, learned from the passes that ran. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockOrder:
    """The visits that the next pass is expected to make, in order; a block may come more than once.

    It starts as given and is replaced by what a completed pass really did when that pass did something the forecast
    lacks, or when two passes in a row did the same. So a pass that merely skips (guidance that runs a subset every
    other time, a step cache) does not unlearn the full order, and a model that always skips is learned after two.
    """

    def __init__(self, visits: Sequence[int]) -> None:
        self._previous: tuple[int, ...] | None = None
        self._set(tuple(visits))

    def _set(self, visits: tuple[int, ...]) -> None:
        self.visits = visits
        self._last = {block: index for index, block in enumerate(visits)}
        self._first = {block: index for index, block in reversed(list(enumerate(visits)))}

    def position_before(self, block: int, position: int) -> int:
        """The next place at or after ``position`` where ``block`` comes, else its first; unknown blocks stay put."""
        if block not in self._last:
            return position
        if self._last[block] < position:
            return self._first[block]
        return self.visits.index(block, position)

    def position_after(self, block: int, position: int) -> int:
        """Where a pass at ``position`` stands once it has run ``block``."""
        return self.position_before(block, position) + 1 if block in self._last else position

    def comes_after(self, block: int, position: int) -> bool:
        """Whether a pass at ``position`` is expected to visit ``block`` yet."""
        return self._last.get(block, -1) >= position

    def ahead(self, position: int, num_blocks: int, following: Sequence[int] | None = None) -> list[int]:
        """The next distinct blocks from ``position`` on, around the end into the next pass, which visits ``following``
        (None: as this one does); at most ``num_blocks``.
        """
        distinct: dict[int, None] = {}
        for visits in (self.visits[position:], self.visits if following is None else following):
            for block in visits:
                if len(distinct) >= num_blocks:
                    return list(distinct)
                distinct.setdefault(block)
        return list(distinct)

    def learn(self, visited: Iterable[int]) -> None:
        """Take note of a completed pass."""
        seen = tuple(visited)
        if seen and seen != self.visits and (seen == self._previous or not _is_subsequence(seen, self.visits)):
            self._set(seen)
        self._previous = seen


def _is_subsequence(part: Sequence[int], whole: Sequence[int]) -> bool:
    rest = iter(whole)
    return all(any(block == other for other in rest) for block in part)
