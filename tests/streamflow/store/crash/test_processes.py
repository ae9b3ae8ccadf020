"""Many processes, one entry; a rebuild under live leases; locks that do not lock; a fork."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamflow.store.errors import EntryRejectedError, LockFailedError, StoreError
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.files import FileOperations
from tests.streamflow.store.crash.kit import (
    SOURCE,
    Quick,
    flip_a_byte,
    locked_files,
    opened,
    publish_source,
    tiny,
    unfinished,
)
from tests.streamflow.store.crash.opener import MODEL

PROGRAM = "tests.streamflow.store.crash.opener"


class Process:
    """A running opener, spoken to by lines."""

    def __init__(self, root: Path, backend: str) -> None:
        command = [sys.executable, "-m", PROGRAM, str(root), backend]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def end(self) -> int:
        """Its exit code. Killed, where it does not end by itself."""
        try:
            self._process.communicate(timeout=30)
        finally:
            self._process.kill()
            self._process.communicate()
        return self._process.returncode


@contextmanager
def openers(root: Path, count: int) -> Iterator[list[Process]]:
    """Processes that are about to open the source; all have ended well by the end."""
    processes = [Process(root, ["asyncio", "trio"][number % 2]) for number in range(count)]
    codes = []
    try:
        yield processes
    finally:
        codes = [process.end() for process in processes]
    assert codes == [0] * count


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_eight_processes_that_open_one_cold_source_publish_one_entry(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with openers(root, 8) as processes:
        for process in processes:
            process.go_on()
        told = [process.hear() for process in processes]
        for process in processes:
            process.go_on()
            process.hear()
    assert [one["published"] for one in told].count(True) == 1
    assert len({tuple(one["inodes"]) for one in told}) == 1
    assert all(one["is_right"] and not one["torch"] for one in told)
    assert len({tuple(one["mapped"]) for one in told}) == 1
    assert len(list(root.glob("entries/*/*"))) == 1
    assert unfinished(root) == []
    assert locked_files(root) == []


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_rebuild_leaves_the_damaged_generation_to_those_who_hold_it(tmp_path: Path) -> None:
    """Two processes hold it while it is damaged, put aside and replaced; it is removed once they are gone."""
    root = tmp_path / "store"
    with openers(root, 2) as processes:
        for process in processes:
            process.go_on()
        before = [process.hear() for process in processes]
        assert {one["generation"] for one in before} == {1}
        flip_a_byte(root)

        async def rebuild() -> int:
            async with opened(root) as store:
                content_id = await store.content_of(SOURCE)
                assert content_id is not None
                with pytest.raises(EntryRejectedError):
                    await store.lease(content_id)
                with await publish_source(store, MODEL) as lease:
                    assert MODEL.is_in(lease)
                    assert await store.evict(EvictionPolicy()) == (), "somebody uses the damaged generation"
                    return lease.generation

        assert anyio.run(rebuild) == 2
        for process in processes:
            process.go_on()
            told = process.hear()
            assert told == {"is_right": False, "generation": 1}, "it goes on with the bytes that it has"

    async def evict() -> list[int]:
        async with opened(root) as store:
            return [evicted.generation for evicted in await store.evict(EvictionPolicy())]

    assert anyio.run(evict) == [1]


class Unlocked(Quick):
    """Locks that everybody gets."""

    def flock(self, fd: int, operation: int) -> None:
        os.fstat(fd)


class WithoutLocks(Quick):
    """A filesystem that has no locks."""

    def flock(self, fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


class UnlockedLater(Quick):
    """Locks that everybody gets, once the store has looked whether they lock."""

    is_checked = False

    def flock(self, fd: int, operation: int) -> None:
        if not self.is_checked:
            super().flock(fd, operation)


@pytest.mark.anyio
@pytest.mark.parametrize("files", [Unlocked(), WithoutLocks()], ids=["no-op", "ENOSYS"])
async def test_where_locks_do_not_lock_nothing_is_opened(tmp_path: Path, files: FileOperations) -> None:
    with pytest.raises(LockFailedError):
        async with opened(tmp_path / "store", files):
            raise AssertionError("it was opened")


@pytest.mark.anyio
async def test_publishers_that_do_not_exclude_each_other_get_right_bytes_or_a_typed_refusal(tmp_path: Path) -> None:
    """Locks may stop to lock later (a remounted disk): names are given in one step all the same."""
    files, root = UnlockedLater(), tmp_path / "store"
    results: list[bool | StoreError] = []
    async with opened(root, files) as store:
        files.is_checked = True

        async def publish() -> None:
            try:
                with await publish_source(store, MODEL) as lease:
                    results.append(MODEL.is_in(lease))
            except StoreError as failure:
                results.append(failure)

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(publish)
    assert True in results
    assert False not in results
    async with opened(root) as store:
        with await publish_source(store, MODEL) as lease:
            assert MODEL.is_in(lease)
        (await publish_source(store, tiny(seed=5), "other")).close()
    assert unfinished(root) == []
