"""Publication locks: for one at a time among tasks and processes, waited for on a free loop, within bounds."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from streamflow.store.errors import InvalidIdentityError, LockTimeoutError, StoreClosedError, StoreCode
from tests.streamflow.store.kit import opened

pytestmark = pytest.mark.anyio


async def test_one_task_at_a_time_holds_it(root: Path) -> None:
    holders: list[int] = []
    async with opened(root) as store, anyio.create_task_group() as tasks:

        async def hold(task: int) -> None:
            async with store.publication_lock("source"):
                holders.append(task)
                await anyio.sleep(0.01)
                assert holders[-1] == task

        for task in range(5):
            tasks.start_soon(hold, task)
    assert sorted(holders) == [0, 1, 2, 3, 4]


async def test_a_lock_that_is_held_for_too_long_is_given_up_with_its_name(root: Path) -> None:
    async with opened(root, publication_wait_s=0.05) as store, store.publication_lock("source"):
        with pytest.raises(
            LockTimeoutError, match=r"publishing source.*source\.lock.*0\.05 s.*publication_wait_s"
        ) as it:
            async with store.publication_lock("source"):
                raise AssertionError("it was held twice")
    assert (it.value.code, it.value.is_retryable) == (StoreCode.LOCK_TIMEOUT, True)


async def test_waiting_leaves_the_loop_free_and_can_be_cancelled(root: Path) -> None:
    async with opened(root) as store, store.publication_lock("source"), anyio.create_task_group() as tasks:
        waiting = anyio.Event()

        async def wait() -> None:
            waiting.set()
            async with store.publication_lock("source"):
                raise AssertionError("it was held twice")

        tasks.start_soon(wait)
        await waiting.wait()
        for _ in range(20):
            before = anyio.current_time()
            await anyio.lowlevel.checkpoint()
            assert anyio.current_time() - before < 1
        tasks.cancel_scope.cancel()


async def test_a_dead_holder_holds_nothing_and_the_file_stays(root: Path) -> None:
    async with opened(root) as store:
        async with store.publication_lock("source"):
            pass
        path = root / "locks" / "source.lock"
        code = (
            "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
        )
        inode = path.stat().st_ino
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert holder.stdout is not None
            assert await anyio.to_thread.run_sync(holder.stdout.readline) == b"held\n"
            with open(path) as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            holder.kill()
            holder.communicate()
        async with store.publication_lock("source"):
            assert path.stat().st_ino == inode


async def test_different_identities_do_not_wait_for_each_other(root: Path) -> None:
    async with opened(root) as store, store.publication_lock("a"), store.publication_lock("b"):
        pass


async def test_names_that_lead_elsewhere_are_refused(root: Path) -> None:
    async with opened(root) as store:
        with pytest.raises(InvalidIdentityError):
            async with store.publication_lock("../../etc/passwd"):
                raise AssertionError("it was held")


async def test_a_closed_store_is_refused(root: Path) -> None:
    async with opened(root) as store:
        pass
    with pytest.raises(StoreClosedError, match="open it again"):
        await store.content_of("source")
