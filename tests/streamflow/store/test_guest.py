"""The store as a guest of a server: it never blocks the loop, and leaves nothing behind however often it is opened."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from streamflow.store.eviction_policy import EvictionPolicy
from tests.streamflow.store.kit import Scripted, model, opened, publish

pytestmark = pytest.mark.anyio


async def test_no_operation_on_the_disk_is_done_by_the_thread_of_the_loop(root: Path, tmp_path: Path) -> None:
    loop_thread = threading.get_ident()
    threads: dict[str, set[int]] = {}

    def before(number: int, operation: str, arguments: object) -> None:
        threads.setdefault(operation, set()).add(threading.get_ident())

    (tmp_path / "source").write_bytes(b"data")
    async with opened(root, Scripted(before)) as store:
        published = await store.publish(model().draft(), source_id="source")
        lease = await store.lease(published.content_id)
        assert lease is not None
        with lease:
            await store.verify(lease)
        await store.source_digest(tmp_path / "source")
        await store.content_of("source")
        await store.entries()
        async with store.publication_lock("other"):
            pass
        await store.quarantine(published.content_id, 1, "a test")
        await store.publish(model().draft(), source_id="source")
        await store.evict(EvictionPolicy(max_bytes=0))
    assert {"open", "pwrite", "fallocate", "fsync", "fchmod", "mkdir", "rename", "unlink", "rmdir"} == threads.keys()
    assert loop_thread not in set().union(*threads.values())


def my_locks() -> int:
    return sum(line.split()[4] == str(os.getpid()) for line in Path("/proc/locks").read_text().splitlines())


async def test_opening_and_leasing_again_and_again_leaves_files_and_locks_as_they_were(root: Path) -> None:
    content_id = await publish(root)
    counts = []
    for _ in range(20):
        async with opened(root) as store:
            for _ in range(3):
                lease = await store.lease(content_id)
                assert lease is not None
                with lease:
                    assert lease.mapping(0).nbytes
        counts.append((len(os.listdir("/proc/self/fd")), my_locks()))
    assert len(set(counts)) == 1
