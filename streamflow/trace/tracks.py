"""The tracks of a trace: which row of the timeline an event belongs to, and in which order the rows come. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import attrs

TrackKind = Literal["walks", "loop", "place", "thread", "stream", "packing", "slot", "allocator"]
#: Where the ids of each kind begin: rows are sorted by them.
_FIRST: dict[TrackKind, int] = {
    "walks": 1,
    "place": 10,
    "thread": 100,
    "loop": 200,
    "stream": 300,
    "packing": 400,
    "slot": 500,
    "allocator": 900,
}


@attrs.define
class Tracks:
    """The tracks of one engine, numbered as they are met."""

    pid: int
    _ids: dict[tuple[TrackKind, str], int] = attrs.field(factory=dict)

    def tid(self, kind: TrackKind, name: str) -> int:
        """The id of a track."""
        known = self._ids.get((kind, name))
        if known is None:
            number = sum(other == kind for other, _ in self._ids)
            known = self._ids[kind, name] = _FIRST[kind] + number
        return known

    def numbered(self, kind: TrackKind, name: str, number: int) -> int:
        """The id of a track that has a number of its own."""
        return self._ids.setdefault((kind, name), _FIRST[kind] + number)

    def names(self) -> Iterator[dict[str, Any]]:
        """The events that name and sort the tracks."""
        for (_, name), tid in self._ids.items():
            yield {"ph": "M", "pid": self.pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": self.pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
