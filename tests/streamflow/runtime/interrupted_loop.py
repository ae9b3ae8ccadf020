"""A program whose main thread runs a loop, interrupted wherever its tasks can be while they use `open_offload`."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import trio

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.mailbox import Mailbox
from streamflow.stages.signals import loop_waker
from tests.streamflow.runtime.interrupts import (
    gated_reads,
    in_daemon,
    interrupt,
    interrupted,
    replaced,
    run_scenarios,
    until_told_to_stop,
    when_main_is_in,
)
from tests.streamflow.runtime.kit import Subject, make_subject, wait_for

#: ``asyncio.run`` or ``trio.run``, over a function.
Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]

STAGED = {"transfer": "staged", "packing_threads": 1, "window_blocks": 1}


def interrupter() -> Callable[[], None]:
    """What interrupts the program, from any thread.

    It rings the current loop, too: a signal that comes in the moment when asyncio's loop falls asleep does not wake it.
    """
    wake = loop_waker()

    def act() -> None:
        interrupt()
        wake(lambda: None)

    return act


def trio_sleeps() -> Callable[..., object]:
    """The function in which trio's loop sleeps."""
    from trio._core import _io_epoll

    return _io_epoll.EpollIOManager.get_events


def in_each_block(subject: Subject, device: CpuDevice, run: Run) -> None:
    for stop in range(subject.num_blocks):

        async def main(stop: int = stop) -> None:
            act = interrupter()
            subject.script.inside = lambda index: until_told_to_stop(act) if index == stop else None
            async with streamflow.open_offload(subject.model, device=device) as offload:
                await offload.run(subject.forward)

        with interrupted():
            run(main)
        assert subject.script.entered == list(range(stop + 1))
        subject.check_restored(device)
        subject.script.reset()


def twice(subject: Subject, device: CpuDevice, run: Run) -> None:
    """The second comes while the request waits for its thread, and the loop sleeps."""

    async def main() -> None:
        act = interrupter()

        def interrupt_twice() -> None:
            until_told_to_stop(act)
            when_main_is_in(selectors.EpollSelector.select if run is RUNS["asyncio"] else trio_sleeps(), act).join()

        subject.script.inside = lambda index: interrupt_twice() if index == 1 else None
        async with streamflow.open_offload(subject.model, device=device) as offload:
            await offload.run(subject.forward)

    with interrupted():
        run(main)
    assert subject.script.entered == [0, 1]


def waiting_for_a_block(subject: Subject, device: CpuDevice, run: Run) -> None:
    """The request's thread waits in its mailbox: nobody reads the block."""
    original = Mailbox.wait

    async def main() -> None:
        act = interrupter()
        async with streamflow.open_offload(subject.model, STAGED, device=device) as offload:
            assert await offload.run(subject.forward) == subject.expected
            with gated_reads() as gate:

                def wait(mailbox: Mailbox, block: int) -> object:
                    act()
                    try:
                        return original(mailbox, block)
                    finally:
                        gate.open.set()

                with replaced(Mailbox, "wait", wait):
                    await offload.run(subject.forward)

    with interrupted():
        run(main)


def opening(subject: Subject, device: CpuDevice, run: Run) -> None:
    """A resident block is not read, until the loop has heard of the interrupt."""

    async def main() -> None:
        act, wake = interrupter(), loop_waker()
        with gated_reads() as gate:

            def interrupt_and_read() -> None:
                wait_for(gate.reached)
                act()
                wake(gate.open.set)

            in_daemon(interrupt_and_read)
            async with streamflow.open_offload(subject.model, {**STAGED, "resident_blocks": 1}, device=device):
                raise AssertionError("it opened")

    with interrupted():
        run(main)


def in_the_body(subject: Subject, device: CpuDevice, run: Run) -> None:
    """The body waits for something else."""

    async def main() -> None:
        act = interrupter()
        async with streamflow.open_offload(subject.model, device=device) as offload:
            assert await offload.run(subject.forward) == subject.expected
            in_daemon(act)
            await anyio.sleep_forever()

    with interrupted():
        run(main)


def in_the_request_of_another_task(subject: Subject, device: CpuDevice, run: Run) -> None:
    """A task of a group awaits the request, and the main task the group, which may wrap what comes out."""

    async def main() -> None:
        act = interrupter()
        subject.script.inside = lambda index: until_told_to_stop(act) if index == 1 else None
        async with streamflow.open_offload(subject.model, device=device) as offload:  # noqa: SIM117
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(offload.run, subject.forward)

    try:
        run(main)
    except KeyboardInterrupt:
        pass
    except BaseExceptionGroup as group:
        assert group.split(KeyboardInterrupt)[1] is None
    else:
        raise AssertionError("no KeyboardInterrupt came out")
    assert subject.script.entered == [0, 1]


SCENARIOS: list[Callable[[Subject, CpuDevice, Run], None]] = [
    in_each_block,
    twice,
    waiting_for_a_block,
    opening,
    in_the_body,
    in_the_request_of_another_task,
]
RUNS: dict[str, Run] = {"asyncio": lambda main: asyncio.run(main()), "trio": lambda main: trio.run(main)}


def run_one(scenario: Callable[[Subject, CpuDevice, Run], None], run: Run) -> None:
    """Run a scenario, and fail unless it leaves everything as it was."""
    subject, device = make_subject(), CpuDevice()
    scenario(subject, device, run)
    subject.check_restored(device)


def main(loop: str) -> None:
    run_scenarios({scenario.__name__: partial(run_one, scenario, RUNS[loop]) for scenario in SCENARIOS})
