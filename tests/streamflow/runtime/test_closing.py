"""Closing in the middle of something: who is served is stopped, who waits is refused, and nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import streamflow
from streamflow import Offload
from streamflow.stages.devices.cpu import CpuEvent
from streamflow.stages.errors import EngineClosedError
from streamflow.stages.mailbox import Mailbox
from streamflow.stages.testing.held import HeldCpuDevice
from tests.streamflow.runtime.kit import ONE_AT_A_TIME, Stops, Subject, make_subject, until, until_so, wait_for

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

NUM_BLOCKS = 4


async def refused(offload: Offload, subject: Subject) -> None:
    """A request that closing ends, or does not let begin."""
    with pytest.raises(EngineClosedError):
        await offload.run(subject.forward)


def refused_directly(subject: Subject) -> None:
    """The same for a call from a thread."""
    with pytest.raises(EngineClosedError):
        subject.forward()


@asynccontextmanager
async def closing(subject: Subject, device: HeldCpuDevice, **options: Any) -> AsyncIterator[tuple[Offload, Any]]:
    """An offload, and a task group whose tasks see it close. Fails unless nothing is left in the end."""
    opened = streamflow.open_offload(subject.model, options, device=device)
    async with anyio.create_task_group() as tasks, opened as offload:
        yield offload, tasks
    assert offload.state == "closed"
    assert (offload.statistics().num_running, offload.statistics().num_waiting) == (0, 0)
    subject.check_restored(device)


@pytest.mark.parametrize("block", range(NUM_BLOCKS - 1))
async def test_a_request_of_another_task_is_stopped_at_its_next_block(block: int, stops: Stops) -> None:
    subject, in_block = make_subject(NUM_BLOCKS), threading.Event()

    def stay(index: int) -> None:
        if index == block:
            in_block.set()
            wait_for(stops.told)

    subject.script.inside = stay
    async with closing(subject, HeldCpuDevice()) as (offload, tasks):
        tasks.start_soon(refused, offload, subject)
        await until(in_block)
    assert subject.script.entered == list(range(block + 1))


async def test_a_request_in_its_last_block_ends_well(stops: Stops) -> None:
    subject, in_block, outputs = make_subject(NUM_BLOCKS), threading.Event(), []

    def stay(index: int) -> None:
        if index == NUM_BLOCKS - 1:
            in_block.set()
            wait_for(stops.told)

    async def run(offload: Offload) -> None:
        outputs.append(await offload.run(subject.forward))

    subject.script.inside = stay
    async with closing(subject, HeldCpuDevice()) as (offload, tasks):
        tasks.start_soon(run, offload)
        await until(in_block)
    assert outputs == [subject.expected]


async def test_a_direct_call_of_another_thread_is_stopped_at_its_next_block(stops: Stops) -> None:
    subject, in_block = make_subject(NUM_BLOCKS), threading.Event()

    def stay(index: int) -> None:
        in_block.set()
        wait_for(stops.told)

    subject.script.inside = stay
    async with closing(subject, HeldCpuDevice()) as (_, tasks):
        tasks.start_soon(anyio.to_thread.run_sync, refused_directly, subject)
        await until(in_block)
    assert subject.script.entered == [0]


async def test_those_who_wait_for_a_place_are_refused(stops: Stops) -> None:
    subject, in_block = make_subject(NUM_BLOCKS), threading.Event()

    def stay(index: int) -> None:
        in_block.set()
        wait_for(stops.told)

    subject.script.inside = stay
    async with closing(subject, HeldCpuDevice(), **ONE_AT_A_TIME) as (offload, tasks):
        tasks.start_soon(refused, offload, subject)
        await until(in_block)
        for _ in range(3):
            tasks.start_soon(refused, offload, subject)
        tasks.start_soon(anyio.to_thread.run_sync, refused_directly, subject)
        await until_so(lambda: offload.statistics().num_waiting == 4)
    assert subject.script.entered == [0], "a refused request ran"


async def test_a_request_that_waits_for_its_block_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, waits = make_subject(NUM_BLOCKS), threading.Event()
    original = Mailbox.wait

    def wait(mailbox: Mailbox, block: int) -> Any:
        waits.set()
        return original(mailbox, block)

    monkeypatch.setattr(Mailbox, "wait", wait)
    monkeypatch.setattr(Mailbox, "post", lambda mailbox, ready: None)
    async with closing(subject, HeldCpuDevice()) as (offload, tasks):
        tasks.start_soon(refused, offload, subject)
        await until(waits)
    assert subject.script.entered == []


async def test_nothing_is_given_back_under_a_copy_that_is_held_back(
    stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waits for the copy, so closing does; the state says meanwhile what it is at."""
    subject, device, waits = make_subject(NUM_BLOCKS), HeldCpuDevice(), threading.Event()
    seen: list[tuple[str, int]] = []
    original = CpuEvent.wait

    def wait(event: CpuEvent) -> None:
        if not event.is_done() and threading.current_thread().name.startswith("streamflow place"):
            waits.set()
        original(event)

    monkeypatch.setattr(CpuEvent, "wait", wait)
    async with closing(subject, device, window_blocks=1) as (offload, tasks):
        await subject.check_next(offload)

        def look_and_let_go() -> None:
            seen.append((offload.state, device.memory().in_use))
            device.let_go()

        stops.action = look_and_let_go
        device.hold()
        waits.clear()
        tasks.start_soon(refused, offload, subject)
        await until(waits)
    ((state, in_use),) = seen
    assert state == "draining"
    assert in_use == offload.statistics().engine.device_peak_bytes > 0


async def test_a_shielded_body_is_served_to_its_end_in_a_cancelled_scope() -> None:
    """As by a server that shuts down, and lets who is being served finish."""
    subject, device = make_subject(NUM_BLOCKS), HeldCpuDevice()
    with anyio.CancelScope() as scope:
        async with streamflow.open_offload(subject.model, {"window_blocks": 1}, device=device) as offload:
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await subject.check_next(offload)
                await subject.check_next(offload)
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    subject.check_restored(device)


async def test_a_cancelled_scope_around_the_body_ends_the_request_of_a_task_outside_of_it(stops: Stops) -> None:
    subject, device, in_block = make_subject(NUM_BLOCKS), HeldCpuDevice(), threading.Event()

    def stay(index: int) -> None:
        in_block.set()
        wait_for(stops.told)

    subject.script.inside = stay
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with streamflow.open_offload(subject.model, device=device) as offload:
                tasks.start_soon(refused, offload, subject)
                await until(in_block)
                scope.cancel()
                await anyio.sleep_forever()
    assert subject.script.entered == [0]
    subject.check_restored(device)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_native_cancel_while_closing_waits_is_not_lost(stops: Stops) -> None:
    """It is absorbed, since closing has to go on, and comes out in the end."""
    subject, device, in_block = make_subject(NUM_BLOCKS), HeldCpuDevice(), threading.Event()
    absorbed = threading.Event()

    def stay(index: int) -> None:
        in_block.set()
        wait_for(absorbed)

    async def open_and_close() -> None:
        async with streamflow.open_offload(subject.model, device=device) as offload:
            tasks.start_soon(refused, offload, subject)
            await until(in_block)

    subject.script.inside = stay
    async with anyio.create_task_group() as tasks:
        task = asyncio.create_task(open_and_close())
        await until(stops.told)
        task.cancel()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        absorbed.set()
        await asyncio.wait([task])
    assert task.cancelled()
    subject.check_restored(device)
