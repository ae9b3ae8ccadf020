"""Tasks that only a stop ends: those that are there, and those that come later."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from streamflow.stages.until_stopped import UntilStopped

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


async def test_a_stop_ends_what_is_in_the_scopes_and_they_go_on_after_them() -> None:
    until_stopped, ended = UntilStopped(), list[int]()

    async def work(number: int) -> None:
        with until_stopped.scope():
            await anyio.sleep_forever()
        ended.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(work, number)
        await anyio.lowlevel.checkpoint()
        until_stopped.stop()
        until_stopped.stop()
    assert sorted(ended) == [0, 1, 2]


async def test_a_scope_that_comes_after_the_stop_is_cancelled_at_its_first_checkpoint() -> None:
    until_stopped = UntilStopped()
    until_stopped.stop()
    with until_stopped.scope():
        await anyio.lowlevel.checkpoint()
        pytest.fail("it went on")


async def test_a_cancellation_from_around_does_not_end_it() -> None:
    until_stopped, checkpoints = UntilStopped(), 0
    with anyio.CancelScope() as around:
        around.cancel()
        with until_stopped.scope():
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
                checkpoints += 1
            until_stopped.stop()
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        pytest.fail("it went on")
    assert checkpoints == 3
    assert around.cancelled_caught
