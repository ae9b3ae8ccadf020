"""The feed: the fixed sequence of fetches of a wave, which every rank makes, whether or not it has a pass. Pure.

A collective that one rank joins and another does not, or in another order, never ends. So while a wave is under way
nothing decides what is fetched next but this: every block of every walk, once, in order. A visit is one block of one
walk; visits are numbered through all walks of all waves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence


class Feed:
    """Counts the visits of the wave under way. ``orders``: the blocks of each collective component, in their order."""

    def __init__(self, orders: Mapping[str, Sequence[int]]) -> None:
        self._orders = {component: tuple(order) for component, order in orders.items()}
        self._walks: tuple[str, ...] = ()
        self._starts: list[int] = [0]
        self._limit = 0
        self._num_started = 0
        self._num_ended = 0
        self._there: set[int] = set()
        #: The visit that is to be fetched next.
        self.next_visit = 0
        #: All visits before this one are there, or were.
        self.num_there = 0
        #: All visits before this one are over here, as of the last look at what is due.
        self.floor = 0

    @property
    def components(self) -> frozenset[str]:
        """The collective components."""
        return frozenset(self._orders)

    @property
    def num_walks(self) -> int:
        """Walks of the wave, as many as are agreed now."""
        return self._limit

    @property
    def num_started(self) -> int:
        """Walks of the wave that were started."""
        return self._num_started

    @property
    def is_on(self) -> bool:
        """Whether a wave is under way: some agreed walk of it has not ended."""
        return self._num_ended < self._limit

    @property
    def num_walks_touched(self) -> int:
        """Walks of which at least one visit was fetched, or which were started."""
        fetched = sum(1 for start in self._starts[:-1] if start < self.next_visit)
        return max(fetched, self._num_started)

    def begin(self, walks: Sequence[str]) -> None:
        """A wave of these walks, by component, is under way from now on.

        :raises RuntimeError: if one is under way already.
        """
        if self.is_on:
            raise RuntimeError("a wave began before the one before it was over")
        base = self._starts[self._limit]  # what the one before did not walk is nobody's visit
        self._walks, self._starts = tuple(walks), [base]
        for component in self._walks:
            self._starts.append(self._starts[-1] + len(self._orders[component]))
        self._limit, self._num_started, self._num_ended = len(self._walks), 0, 0

    def limit(self, num_walks: int) -> None:
        """Fetch and start nothing beyond the first ``num_walks`` walks."""
        self._limit = min(num_walks, len(self._walks))

    @property
    def next_component(self) -> str | None:
        """The component of the walk that is to be started next; None if there is none left."""
        return self._walks[self._num_started] if self._num_started < self._limit else None

    def start_walk(self) -> range:
        """The next walk starts; returns its visits."""
        self._num_started += 1
        return self.visits_of(self._num_started - 1)

    def visits_of(self, walk: int) -> range:
        """The visits of the wave's walk number ``walk``, from 0; empty where there is none."""
        if walk >= self._limit:
            return range(self._starts[self._limit], self._starts[self._limit])
        return range(self._starts[walk], self._starts[walk + 1])

    @property
    def following(self) -> range:
        """The visits of the walk that is to be started next."""
        return self.visits_of(self._num_started)

    def end_walk(self) -> None:
        """The walk that was started last has ended."""
        self._num_ended += 1

    def due(self, floor: int, num_slots: int) -> range:
        """The visits to fetch now, in order, for a window of so many slots that still needs all visits from ``floor``.

        Each is to be noted with `fetching` before the next one is looked at.
        """
        self.floor = floor
        return range(self.next_visit, min(floor + num_slots, self._starts[self._limit]))

    def block_of(self, visit: int) -> int:
        """The block of a visit of this wave."""
        walk = bisect_right(self._starts, visit) - 1
        return self._orders[self._walks[walk]][visit - self._starts[walk]]

    def fetching(self, visit: int) -> None:
        """``visit`` is being fetched."""
        self.next_visit = visit + 1

    def there(self, visit: int) -> None:
        """What ``visit`` brings is there, for whoever needs it."""
        self._there.add(visit)
        while self.num_there in self._there:
            self._there.discard(self.num_there)
            self.num_there += 1
