"""A cancellation at every block boundary stops the forward there, and leaves the next request exact."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
import trio

import streamflow
from streamflow import Offload
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.mailbox import Mailbox
from streamflow.stages.signals import loop_waker
from tests.streamflow.runtime.kit import (
    ONE_AT_A_TIME,
    Script,
    Stops,
    Subject,
    as_task,
    make_subject,
    until,
    until_so,
    wait_for,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

NUM_BLOCKS = 5
#: Where a cancellation comes: before the first block, within each, and after the last.
BOUNDARIES = [-1, *range(NUM_BLOCKS), NUM_BLOCKS]
#: Iterations of an asyncio loop after which a cancel has been thrown into its task and absorbed there.
ITERATIONS = 5

#: Cancels a run, from any thread.
Trigger = Callable[[], None]
#: Starts a run that will call the trigger from its thread.
Run = Callable[[Trigger], Awaitable[object]]
#: Starts a run, and fails unless the trigger cancels it.
Way = Callable[[Run], Awaitable[None]]


def soon(action: Callable[[], object]) -> Trigger:
    """What runs ``action`` on the current loop, from any thread."""
    wake = loop_waker()

    def trigger() -> None:
        assert wake(action)

    return trigger


async def trio_scope(run: Run) -> None:
    with trio.CancelScope() as scope:
        await run(soon(scope.cancel))
    assert scope.cancelled_caught


async def anyio_scope(run: Run) -> None:
    with anyio.CancelScope() as scope:
        await run(soon(scope.cancel))
    assert scope.cancelled_caught


async def cancelled_group(run: Run) -> None:
    """The run is in a task of its own, like a server's handler."""
    ended_normally = False

    async def handler() -> None:
        nonlocal ended_normally
        await run(soon(tasks.cancel_scope.cancel))
        ended_normally = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(handler)
    assert not ended_normally


async def asyncio_wait_for(run: Run) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(as_task(run(let_time_pass())), timeout=500)


async def asyncio_timeout(run: Run) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(500):
            await run(let_time_pass())


def let_time_pass() -> Trigger:
    """What lets a thousand seconds pass on the loop's clock."""
    loop = asyncio.get_running_loop()
    real = loop.time

    def jump() -> None:
        loop.time = lambda: real() + 1000  # type: ignore[method-assign]

    return soon(jump)


async def task_cancel(run: Run) -> None:
    task = asyncio.create_task(as_task(run(soon(lambda: task.cancel()))))
    await asyncio.wait([task])
    assert task.cancelled()


async def task_cancel_twice(run: Run) -> None:
    """The second comes while the run waits for its thread, which stays in its block until that one is absorbed."""
    loop = asyncio.get_running_loop()

    def cancel_twice() -> None:
        for _ in range(2):
            loop.call_soon_threadsafe(task.cancel)
            for _ in range(ITERATIONS):
                passed = threading.Event()
                loop.call_soon_threadsafe(passed.set)
                wait_for(passed)

    task = asyncio.create_task(as_task(run(cancel_twice)))
    await asyncio.wait([task])
    assert task.cancelled()
    assert task.cancelling() == 2


WAYS = [
    pytest.param("trio", trio_scope, id="trio-scope"),
    pytest.param("trio", anyio_scope, id="trio-anyio-scope"),
    pytest.param("trio", cancelled_group, id="trio-group"),
    pytest.param("asyncio", anyio_scope, id="asyncio-anyio-scope"),
    pytest.param("asyncio", cancelled_group, id="asyncio-group"),
    pytest.param("asyncio", asyncio_wait_for, id="asyncio-wait_for"),
    pytest.param("asyncio", asyncio_timeout, id="asyncio-timeout"),
    pytest.param("asyncio", task_cancel, id="asyncio-cancel"),
    pytest.param("asyncio", task_cancel_twice, id="asyncio-cancel-twice"),
]
each_way = pytest.mark.parametrize(("anyio_backend", "way"), WAYS, indirect=["anyio_backend"])


def act_at(script: Script, boundary: int, action: Callable[[], object]) -> None:
    """Let the model call ``action`` when it comes to a boundary first: those behind come there, too."""
    pending = [action]

    def act(index: int) -> None:
        if index == max(boundary, 0) and pending:
            pending.pop()()

    if boundary in range(NUM_BLOCKS):
        script.inside = act
    else:
        script.between = act


async def cancel_at(
    boundary: int,
    offload: Offload,
    subject: Subject,
    way: Way,
    stops: Stops,
    *,
    work: Callable[[], object] | None = None,
    first: Callable[[], object] = lambda: None,
) -> None:
    """Cancel a run from its own thread at ``boundary``, where the thread stays until the run has been told to stop."""
    stops.told.clear()
    subject.script.reset()

    async def run(trigger: Trigger) -> None:
        def reached() -> None:
            first()
            trigger()
            wait_for(stops.told)

        act_at(subject.script, boundary, reached)
        try:
            await offload.run(work or subject.forward)
        finally:
            assert stops.told.is_set()
            num_inside = subject.script.num_inside
            ran = list(range(min(boundary + 1, NUM_BLOCKS)))
            assert subject.script.entered[: len(ran)] == ran
            # whoever waited behind has the place already, and may have begun: at the first block, not at ours
            behind = subject.script.entered[len(ran) :]
            assert behind[:1] in ([], [0])
            assert behind or num_inside == 0, "the run returned while its thread was in the model"

    await way(run)


@each_way
@pytest.mark.parametrize("options", [{}, {"transfer": "staged", "packing_threads": 1, "resident_blocks": 2}])
async def test_the_forward_ends_at_the_boundary_and_the_next_is_exact(
    way: Way, options: dict[str, Any], stops: Stops
) -> None:
    subject = make_subject(NUM_BLOCKS)
    device = CpuDevice()
    async with streamflow.open_offload(
        subject.model, {"poison_freed_slots": True, **options}, device=device
    ) as offload:
        for boundary in BOUNDARIES:
            await cancel_at(boundary, offload, subject, way, stops)
            await subject.check_next(offload)
    subject.check_restored(device)


@each_way
async def test_those_behind_a_cancelled_request_are_not_stopped(way: Way, stops: Stops) -> None:
    """They wait while it is cancelled; they get its place, and not its fate."""
    subject = make_subject(NUM_BLOCKS)
    outputs: list[str] = []

    async def follow(offload: Offload) -> None:
        outputs.append(await offload.run(subject.forward))

    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        for boundary in BOUNDARIES:
            reached, queued = threading.Event(), threading.Event()

            async def first_in_line(
                boundary: int = boundary, reached: threading.Event = reached, queued: threading.Event = queued
            ) -> None:
                def wait_for_followers() -> None:
                    reached.set()
                    wait_for(queued)

                await cancel_at(boundary, offload, subject, way, stops, first=wait_for_followers)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first_in_line)
                await until(reached)
                for _ in range(3):
                    tasks.start_soon(follow, offload)
                await until_so(lambda: offload.statistics().num_waiting == 3)
                assert offload.statistics().num_running == 1
                queued.set()
        assert outputs == [subject.expected] * 3 * len(BOUNDARIES)
        await subject.check_next(offload)


@each_way
async def test_a_pipeline_that_eats_exceptions_is_stopped_all_the_same(way: Way, stops: Stops) -> None:
    subject = make_subject(NUM_BLOCKS)
    model: Any = subject.model

    def eat_exceptions() -> None:
        x = subject.inputs
        for block in model.blocks:
            try:
                with torch.no_grad():
                    x = block(x)
            except Exception:
                continue

    async with streamflow.open_offload(subject.model) as offload:
        await cancel_at(2, offload, subject, way, stops, work=eat_exceptions)
        await subject.check_next(offload)


@each_way
async def test_a_forward_that_waits_for_its_block_is_woken(
    way: Way, stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody brings the block that it stands before: the mailbox is what wakes it."""
    subject = make_subject(NUM_BLOCKS)
    stops.told.clear()
    original = Mailbox.wait
    async with streamflow.open_offload(subject.model) as offload:
        with monkeypatch.context() as patch:

            async def run(trigger: Trigger) -> None:
                def wait(mailbox: Mailbox, block: int) -> Any:
                    trigger()
                    return original(mailbox, block)

                patch.setattr(Mailbox, "wait", wait)
                patch.setattr(Mailbox, "post", lambda mailbox, ready: None)
                await offload.run(subject.forward)

            await way(run)
        assert stops.told.is_set()
        assert subject.script.entered == []
        await subject.check_next(offload)
