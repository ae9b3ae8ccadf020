"""A forked child closes what it inherited, releases no lock, and may not use the store."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from streamflow.store.descriptors import num_open
from streamflow.store.errors import StoreForkedError
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.lease import Lease
from streamflow.store.store import HostWeightStore
from tests.streamflow.store.kit import model, opened, publish

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a child in which ``work`` was run: 0 if it raised nothing."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_paths() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return found


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(StoreForkedError, match="open the store in this process"):
        work()


def step(awaitable: object) -> object:
    """Run a coroutine to its first wait: what a store refuses, it refuses before that."""
    return awaitable.send(None)  # type: ignore[attr-defined]


async def test_a_child_has_nothing_open_and_is_refused(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        lease = await store.lease(content_id)
        assert lease is not None
        with lease:
            async with store.publication_lock("source"):
                assert num_open() > 2
                assert in_child(lambda: _look_around(root, store, lease)) == 0
                async with opened(root, publication_wait_s=0.02) as other:
                    with pytest.raises(TimeoutError):  # the child has released nothing
                        async with other.publication_lock("source"):
                            raise AssertionError("it was held twice")
                    assert await other.evict(EvictionPolicy(max_bytes=0)) == ()
            lease.fill(0, memoryview(bytearray(8)), 0)


def _look_around(root: Path, store: HostWeightStore, lease: Lease) -> None:
    assert num_open() == 0
    assert [path for path in open_paths() if path.startswith(str(root))] == []
    refused(lambda: lease.fill(0, memoryview(bytearray(8)), 0))
    refused(lambda: lease.mapping(0))
    refused(lambda: lease.fileno(0))
    refused(lambda: step(store.content_of("source")))
    refused(lambda: step(store.lease(lease.content_id)))
    refused(lambda: step(store.publish(model().draft(), source_id=None)))
    refused(lambda: step(store.verify(lease)))
    refused(lambda: step(store.source_digest("x")))
    refused(lambda: step(store.publication_lock("x").__aenter__()))
    assert lease.place(0).nbytes
    lease.close()


async def test_a_child_that_lives_on_does_not_keep_the_parents_locks(root: Path) -> None:
    content_id = await publish(root)
    read, write = os.pipe()
    async with opened(root) as store:
        lease = await store.lease(content_id)
        assert lease is not None
        async with store.publication_lock("source"):
            pid = os.fork()
            if pid == 0:
                os.close(write)
                os.read(read, 1)  # lives until the parent closes its end
                os._exit(0)
        lease.close()
        try:
            async with store.publication_lock("source"):
                pass
            assert [found.content_id for found in await store.evict(EvictionPolicy(max_bytes=0))] == [content_id]
        finally:
            os.close(read)
            os.close(write)
            os.waitpid(pid, 0)


async def test_a_started_program_inherits_nothing(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        lease = await store.lease(content_id)
        assert lease is not None
        with lease:
            code = "import os; print([os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')])"
            found = await anyio.to_thread.run_sync(
                lambda: subprocess.run(
                    [sys.executable, "-c", code],
                    capture_output=True,
                    text=True,
                    check=True,
                    close_fds=False,
                )
            )
            assert str(root) not in found.stdout
            assert "/proc" in found.stdout


async def test_a_child_may_open_the_store_itself(root: Path) -> None:
    content_id = await publish(root)
    code = f"""
import os, anyio
from tests.streamflow.store.kit import opened
async def lease():
    async with opened({str(root)!r}) as store:
        (await store.lease({content_id!r})).close()
anyio.run(lease)
if os.fork() == 0:
    anyio.run(lease)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    folder = Path(__file__).resolve().parents[3]
    await anyio.run_process([sys.executable, "-c", code], cwd=folder)
