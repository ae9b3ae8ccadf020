"""Eviction removes what the policy names, the longest unused first, and nothing that is in use."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from streamflow.store.errors import EntryRejectedError, StoreOptionsError
from streamflow.store.eviction_policy import Candidate, EvictionPolicy, eviction_order, why_evicted
from tests.streamflow.store.kit import Scripted, model, opened, publish, tree, unfinished

candidates = st.lists(
    st.builds(
        Candidate,
        content_id=st.sampled_from(["a", "b", "c"]),
        generation=st.integers(1, 9),
        nbytes=st.integers(0, 100),
        last_used_s=st.integers(0, 1000).map(float),
        is_denied=st.booleans(),
    )
)


@given(found=candidates, max_bytes=st.integers(0, 300), max_age_s=st.none() | st.integers(0, 1000))
def test_what_stays_fits_the_policy_and_was_used_last(
    found: list[Candidate], max_bytes: int, max_age_s: int | None
) -> None:
    policy = EvictionPolicy(max_bytes=max_bytes, max_age_s=max_age_s)
    total = sum(candidate.nbytes for candidate in found)
    kept: list[Candidate] = []
    gone: list[Candidate] = []
    for candidate in eviction_order(found):
        if why_evicted(candidate, total, 1000.0, policy) is None:
            kept.append(candidate)
        else:
            gone.append(candidate)
            total -= candidate.nbytes
    assert total <= max_bytes
    assert not any(candidate.is_denied for candidate in kept)
    if max_age_s is not None:
        assert all(1000.0 - candidate.last_used_s <= max_age_s for candidate in kept)
    usable = [candidate.last_used_s for candidate in gone if not candidate.is_denied]
    assert max(usable, default=0) <= min((candidate.last_used_s for candidate in kept), default=1000)


@given(found=candidates)
def test_without_limits_only_what_is_unusable_goes(found: list[Candidate]) -> None:
    gone = [why_evicted(candidate, 10**12, 1e12, EvictionPolicy()) for candidate in found]
    assert [reason is not None for reason in gone] == [candidate.is_denied for candidate in found]


@pytest.mark.parametrize(
    "limits", [{"max_bytes": -1}, {"max_age_s": math.nan}, {"max_bytes": True}, {"max_age_s": "1"}]
)
def test_a_limit_that_makes_no_sense_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(StoreOptionsError, match=next(iter(limits))):
        EvictionPolicy(**limits)


def used_at(root: Path, content_id: str, seconds: int) -> None:
    os.utime(root / "entries" / content_id / "g1" / "lease", (seconds, seconds))


@pytest.mark.anyio
async def test_the_longest_unused_go_until_the_rest_fits(root: Path) -> None:
    ids = [await publish(root, seed) for seed in range(3)]
    for content_id, seconds in zip(ids, (300, 100, 200), strict=True):
        used_at(root, content_id, seconds)
    async with opened(root) as store:
        entries = {info.content_id: info for info in await store.entries()}
        assert {content_id: info.source_ids for content_id, info in entries.items()} == {
            content_id: (f"source-{seed}",) for seed, content_id in enumerate(ids)
        }
        largest = max(info.nbytes for info in entries.values())
        evicted = await store.evict(EvictionPolicy(max_bytes=largest))
        assert [found.content_id for found in evicted] == [ids[1], ids[2]]
        assert [found.nbytes for found in evicted] == [entries[ids[1]].nbytes, entries[ids[2]].nbytes]
        assert [info.content_id for info in await store.entries()] == [ids[0]]
        assert [await store.content_of(f"source-{seed}") for seed in range(3)] == [ids[0], None, None]
        assert await store.lease(ids[1]) is None
    assert unfinished(root) == []
    assert os.listdir(root / "entries") == [ids[0]]


@pytest.mark.anyio
async def test_what_was_not_used_for_long_goes(root: Path) -> None:
    ids = [await publish(root, seed) for seed in range(2)]
    used_at(root, ids[1], 100)
    async with opened(root) as store:
        assert [found.content_id for found in await store.evict(EvictionPolicy(max_age_s=3600))] == [ids[1]]


@pytest.mark.anyio
async def test_what_is_leased_or_being_published_is_skipped(root: Path) -> None:
    leased, published, free = [await publish(root, seed) for seed in range(3)]
    async with opened(root) as store, opened(root) as other:
        lease = await other.lease(leased)
        assert lease is not None
        with lease:
            assert {info.content_id for info in await store.entries() if info.is_leased} == {leased}
            async with other.publication_lock(published):
                evicted = await store.evict(EvictionPolicy(max_bytes=0))
            assert [found.content_id for found in evicted] == [free]
            await store.verify(lease)
        assert {found.content_id for found in await store.evict(EvictionPolicy(max_bytes=0))} == {leased, published}


@pytest.mark.anyio
async def test_an_evicted_entry_can_be_published_again(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        await store.evict(EvictionPolicy(max_bytes=0))
        again = await store.publish(model().draft(), source_id="source-0")
        assert (again.content_id, again.was_present) == (content_id, False)


@pytest.mark.anyio
async def test_quarantined_generations_go_unless_they_are_leased(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        lease = await store.lease(content_id)
        assert lease is not None
        with lease:
            await store.quarantine(content_id, 1, "a test")
            assert await store.lease(content_id) is None
            assert await store.evict(EvictionPolicy()) == ()
            lease.fill(0, memoryview(bytearray(8)), 0)
            assert (await store.publish(model().draft(), source_id=None)).generation == 2
        (evicted,) = await store.evict(EvictionPolicy())
        assert (evicted.content_id, evicted.generation, evicted.reason) == (content_id, 1, "damaged")
        assert os.listdir(root / "quarantine") == []
        assert [info.generation for info in await store.entries()] == [2]


@pytest.mark.anyio
async def test_an_eviction_that_stops_half_way_leaves_no_half_entry(quick_root: Path) -> None:
    """At every step: what is in its place afterwards is whole, and the next round finishes the work."""
    steps: list[str] = []
    root = quick_root / "counted"
    content_id = await publish(root)
    async with opened(root, Scripted(lambda number, operation, arguments: steps.append(operation))) as store:
        before = len(steps)
        await store.evict(EvictionPolicy(max_bytes=0))
    assert len(steps) - before > 10
    for stop in range(before, len(steps)):

        def fail(number: int, operation: str, arguments: object, stop: int = stop) -> None:
            if number >= stop:
                raise OSError("stopped")

        there = quick_root / str(stop)
        await publish(there)
        async with opened(there, Scripted(fail)) as store:
            await store.evict(EvictionPolicy(max_bytes=0))
        async with opened(there, verification="digest") as store:
            try:
                lease = await store.lease(content_id)
            except EntryRejectedError as rejected:
                pytest.fail(f"half an entry after step {stop}: {rejected}")
            if lease is not None:
                lease.close()
            await store.evict(EvictionPolicy(max_bytes=0))
            await store.publish(model(1).draft(), source_id=None)  # cleans up what was left in tmp
        assert unfinished(there) == []
        assert content_id not in "".join(tree(there / "entries"))
