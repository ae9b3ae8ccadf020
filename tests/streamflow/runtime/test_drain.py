"""Closing that serves before it ends: in which order, for how long, and what cuts it short."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

import streamflow
from streamflow import Offload
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import EngineClosedError
from tests.streamflow.runtime.kit import ONE_AT_A_TIME, Stops, Subject, make_subject, until, until_so, wait_for

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

DRAIN: dict[str, Any] = {**ONE_AT_A_TIME, "close_mode": "drain", "close_deadline_s": 60.0}


class Traffic:
    """One request that runs, held in its first block, and two that wait; ``ends`` says what became of them."""

    def __init__(self, subject: Subject, offload: Offload) -> None:
        self.ends: list[str] = []
        self.let_go = threading.Event()
        self._subject, self._offload = subject, offload
        self._in_block = threading.Event()

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        self._subject.script.inside = self._stay
        tasks.start_soon(self._ask, "running")
        await until(self._in_block)
        for number in (1, 2):
            tasks.start_soon(self._ask, f"waiting {number}")
            await until_so(lambda number=number: self._offload.statistics().num_waiting == number)  # type: ignore[misc]

    def _stay(self, index: int) -> None:
        if not self._in_block.is_set():
            self._in_block.set()
            wait_for(self.let_go)

    async def _ask(self, name: str) -> None:
        try:
            assert await self._offload.run(self._subject.forward) == self._subject.expected
        except EngineClosedError:
            self.ends.append(f"{name}: refused")
        else:
            self.ends.append(f"{name}: served")

    async def ask_when_draining(self) -> None:
        """A request that comes too late; then the one that runs is let go."""
        await until_so(lambda: self._offload.state == "draining")
        await self._ask("late")
        self.let_go.set()


@asynccontextmanager
async def busy(subject: Subject, options: dict[str, Any]) -> AsyncIterator[tuple[Traffic, anyio.abc.TaskGroup]]:
    """An offload with traffic, which closes while the traffic goes on. Fails unless all is given back."""
    device = CpuDevice()
    async with (
        anyio.create_task_group() as tasks,
        streamflow.open_offload(subject.model, options, device=device) as offload,
    ):
        traffic = Traffic(subject, offload)
        await traffic.start(tasks)
        yield traffic, tasks
    subject.check_restored(device)
    assert offload.state == "closed"


async def test_draining_serves_who_runs_and_who_waits_and_refuses_who_comes() -> None:
    subject = make_subject()
    async with busy(subject, DRAIN) as (traffic, tasks):
        tasks.start_soon(traffic.ask_when_draining)
    assert traffic.ends == ["late: refused", "running: served", "waiting 1: served", "waiting 2: served"]


async def test_at_its_deadline_draining_cuts(stops: Stops) -> None:
    subject = make_subject()
    async with busy(subject, DRAIN | {"close_deadline_s": 0.05}) as (traffic, _):
        stops.action = traffic.let_go.set
    assert sorted(traffic.ends) == ["running: refused", "waiting 1: refused", "waiting 2: refused"]
    assert subject.script.entered == [0]


async def test_a_cancellation_cuts_at_once(stops: Stops) -> None:
    subject, scope = make_subject(), anyio.CancelScope()
    ends: list[list[str]] = []

    async def cancel(offload: Offload) -> None:
        await until_so(lambda: offload.state == "draining")
        scope.cancel()

    device = CpuDevice()
    async with anyio.create_task_group() as tasks:
        with scope:
            async with streamflow.open_offload(subject.model, DRAIN, device=device) as offload:
                traffic = Traffic(subject, offload)
                ends.append(traffic.ends)
                await traffic.start(tasks)
                stops.action = traffic.let_go.set
                tasks.start_soon(cancel, offload)
        assert scope.cancelled_caught
    assert sorted(ends[0]) == ["running: refused", "waiting 1: refused", "waiting 2: refused"]
    subject.check_restored(device)


async def test_cutting_refuses_those_who_wait_before_the_running_one_has_ended(stops: Stops) -> None:
    subject = make_subject()

    async def let_go(traffic: Traffic) -> None:
        await until_so(lambda: len(traffic.ends) == 2)
        traffic.let_go.set()

    async with busy(subject, dict(ONE_AT_A_TIME)) as (traffic, tasks):
        tasks.start_soon(let_go, traffic)
    assert sorted(traffic.ends[:2]) == ["waiting 1: refused", "waiting 2: refused"]
    assert traffic.ends[2] == "running: refused"


async def test_sigterm_drains_in_the_documented_order() -> None:
    """As a server does it: the signal ends the body, and leaving the context drains."""
    subject = make_subject()
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async with busy(subject, DRAIN) as (traffic, tasks):
            tasks.start_soon(traffic.ask_when_draining)
            os.kill(os.getpid(), signal.SIGTERM)
            async for received in signals:
                assert received is signal.SIGTERM
                break
    assert traffic.ends == ["late: refused", "running: served", "waiting 1: served", "waiting 2: served"]


async def test_an_offload_on_a_loop_of_its_own_drains_too() -> None:
    subject, device = make_subject(), CpuDevice()
    started = await streamflow.start_offload(subject.model, DRAIN, device=device)
    async with anyio.create_task_group() as tasks:
        traffic = Traffic(subject, started.offload)
        await traffic.start(tasks)
        tasks.start_soon(traffic.ask_when_draining)
        await started.aclose()
    assert traffic.ends[:2] == ["late: refused", "running: served"]
    assert sorted(traffic.ends[2:]) == ["waiting 1: served", "waiting 2: served"]
    subject.check_restored(device)
