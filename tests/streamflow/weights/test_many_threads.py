"""The same work on many things by several threads: each once, none after a failure or a cancellation."""

from __future__ import annotations

import threading

import anyio
import anyio.from_thread
import pytest

from streamflow.stages.threads import open_threads
from streamflow.weights.many_threads import for_each

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("num_threads", [1, 3, 20])
async def test_each_is_done_once(num_threads: int) -> None:
    done: list[int] = []
    async with open_threads() as crew:
        await for_each(range(10), done.append, crew, num_threads)
        await for_each([], done.append, crew, num_threads)
    assert sorted(done) == list(range(10))


async def test_several_are_done_at_once() -> None:
    together = threading.Barrier(3, timeout=10)
    async with open_threads() as crew:
        await for_each(range(3), lambda _: together.wait(), crew, 3)


async def test_none_is_begun_after_a_failure() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        done.append(item)
        if item == 3:
            raise ValueError("the third")

    async with open_threads() as crew:
        with pytest.raises(ValueError, match="the third"):
            await for_each(range(1000), work, crew, 1)
    assert done == [0, 1, 2, 3]


async def test_a_cancelled_call_ends_after_what_was_begun() -> None:
    begun, may_end = anyio.Event(), threading.Event()
    done: list[int] = []
    async with open_threads() as crew, anyio.create_task_group() as tasks:

        def work(item: int) -> None:
            anyio.from_thread.run_sync(begun.set)
            may_end.wait(10)
            done.append(item)

        async def call() -> None:
            await for_each(range(1000), work, crew, 2)
            raise AssertionError("it was not cancelled")

        tasks.start_soon(call)
        await begun.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()  # it has been told
        may_end.set()
    assert 1 <= len(done) <= 2
