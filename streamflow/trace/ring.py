"""The memory of a trace: the newest records, up to a number; older ones are dropped and counted."""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from streamflow.trace.records import Record


class Entry(NamedTuple):
    """A record of the engine with this index; ``serial`` counts all records from 0."""

    serial: int
    engine: int
    record: Record


class Ring:
    """Keeps ``capacity`` records. From any thread; nothing blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._serials = itertools.count()

    def append(self, engine: int, record: Record) -> None:
        """Keep ``record``."""
        self._entries.append(Entry(next(self._serials), engine, record))

    def snapshot(self) -> tuple[list[Entry], int]:
        """The records now, by serial, and how many older ones were dropped."""
        entries: list[Entry] | None = None
        while entries is None:
            with suppress(RuntimeError):  # other threads append meanwhile
                entries = list(self._entries)
        entries.sort()
        return entries, entries[-1].serial + 1 - len(entries) if entries else 0
