"""The ring keeps the newest records in order, drops the oldest and counts them, from any number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import hypothesis
from hypothesis import strategies as st

from streamflow.trace.records import AllocationRecord
from streamflow.trace.ring import Ring


def record(number: int) -> AllocationRecord:
    return AllocationRecord(number, 0.0, 0.0)


@hypothesis.given(st.integers(1, 20), st.integers(0, 50))
def test_the_newest_stay(capacity: int, num: int) -> None:
    ring = Ring(capacity)
    for number in range(num):
        ring.append(number % 3, record(number))
    entries, num_dropped = ring.snapshot()
    assert [entry.record for entry in entries] == [record(number) for number in range(num)][-capacity:]
    assert [entry.engine for entry in entries] == [number % 3 for number in range(num)][-capacity:]
    assert num_dropped == max(0, num - capacity)


def test_many_threads_lose_nothing_that_is_not_counted() -> None:
    ring = Ring(1000)

    def append(thread: int) -> None:
        for number in range(500):
            ring.append(thread, record(number))
            if number % 100 == 0:
                ring.snapshot()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    entries, num_dropped = ring.snapshot()
    assert (len(entries), num_dropped) == (1000, 1000)
    for thread in range(4):
        numbers = [entry.record.nbytes for entry in entries if entry.engine == thread]  # type: ignore[union-attr]
        assert numbers == sorted(numbers)
