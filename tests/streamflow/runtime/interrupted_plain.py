"""A program without a loop, interrupted wherever its main thread can be while it uses `streamflow.offload`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import streamflow
from streamflow.facade import _LoopThread
from streamflow.runtime.loans import Loan
from streamflow.stages.devices.cpu import CpuEvent
from streamflow.stages.mailbox import Mailbox
from streamflow.stages.testing.held import HeldCpuDevice
from tests.streamflow.runtime.interrupts import (
    gated_reads,
    interrupt,
    interrupt_from_elsewhere,
    interrupted,
    replaced,
    run_scenarios,
    when_main_is_in,
)
from tests.streamflow.runtime.kit import Subject, make_subject, wait_for

ONE_SLOT = {"window_blocks": 1}
ONE_PLACE = {"max_running_requests": 1}
STAGED = {"transfer": "staged", "packing_threads": 1, "window_blocks": 1}


def check_next(subject: Subject) -> None:
    """The next forward is exact."""
    subject.script.reset()
    assert subject.forward() == subject.expected, "the next forward is not exact"


def interrupt_at(wanted: int, index: int) -> None:
    """Be interrupted in, or before, the block that is wanted."""
    if index == wanted:
        interrupt_from_elsewhere()


def in_each_block(subject: Subject, device: HeldCpuDevice) -> None:
    with streamflow.offload(subject.model, device=device):
        for stop in range(subject.num_blocks):
            subject.script.reset()
            subject.script.inside = partial(interrupt_at, stop)
            with interrupted():
                subject.forward()
            assert subject.script.entered == list(range(stop + 1))
            check_next(subject)


def between_blocks(subject: Subject, device: HeldCpuDevice) -> None:
    with streamflow.offload(subject.model, device=device):
        for stop in range(subject.num_blocks + 1):
            subject.script.reset()
            subject.script.between = partial(interrupt_at, stop)
            with interrupted():
                subject.forward()
            assert subject.script.entered == list(range(stop))
            check_next(subject)


def waiting_for_a_block(subject: Subject, device: HeldCpuDevice) -> None:
    """Its pieces are not read: the main thread waits in its mailbox."""
    with streamflow.offload(subject.model, STAGED, device=device):
        check_next(subject)
        with gated_reads() as gate:
            watcher = when_main_is_in(Mailbox.wait, interrupt)
            with interrupted():
                subject.forward()
            watcher.join()
            gate.open.set()
        check_next(subject)


def waiting_for_a_copy(subject: Subject, device: HeldCpuDevice) -> None:
    """The copy is queued and held back: the main thread waits for its event."""
    with streamflow.offload(subject.model, ONE_SLOT, device=device):
        check_next(subject)
        interrupt_at_a_held_copy(subject, device)
        device.let_go()
        check_next(subject)


def interrupt_at_a_held_copy(subject: Subject, device: HeldCpuDevice) -> None:
    device.hold()
    watcher = when_main_is_in(CpuEvent.wait, interrupt)
    with interrupted():
        subject.forward()
    watcher.join()


def waiting_for_another_thread(subject: Subject, device: HeldCpuDevice) -> None:
    """Another thread's forward has the only place."""
    outputs: list[str] = []
    in_block, let_go = threading.Event(), threading.Event()

    def hold(index: int) -> None:
        in_block.set()
        wait_for(let_go)

    with streamflow.offload(subject.model, ONE_PLACE, device=device) as offload:
        subject.script.inside = hold
        other = threading.Thread(target=lambda: outputs.append(subject.forward()))
        other.start()
        wait_for(in_block)
        watcher = when_main_is_in(Loan.borrow, interrupt)
        with interrupted():
            subject.forward()
        watcher.join()
        assert (offload.statistics().num_running, offload.statistics().num_waiting) == (1, 0)
        let_go.set()
        other.join()
        assert outputs == [subject.expected]
        check_next(subject)


def out_of_the_context(subject: Subject, device: HeldCpuDevice) -> None:
    """Nobody catches it inside of the ``with``."""
    subject.script.inside = partial(interrupt_at, 2)
    with interrupted(), streamflow.offload(subject.model, device=device) as offload:
        subject.forward()
    assert offload.state == "closed"


def while_opening(subject: Subject, device: HeldCpuDevice) -> None:
    """A resident block is not read, so opening waits, until it has been told to stop."""
    original = _LoopThread.stop
    with gated_reads() as gate:

        def stop(thread: _LoopThread) -> None:
            original(thread)
            gate.open.set()

        with replaced(_LoopThread, "stop", stop):
            when_main_is_in(_LoopThread.open, interrupt)
            with interrupted(), streamflow.offload(subject.model, {**STAGED, "resident_blocks": 1}, device=device):
                raise AssertionError("it opened")


def while_closing(subject: Subject, device: HeldCpuDevice) -> None:
    """A copy is held back, so closing waits. It is interrupted in its wait, and closes all the same."""

    def interrupt_then_let_go() -> None:
        interrupt()
        device.let_go()

    with interrupted(), streamflow.offload(subject.model, ONE_SLOT, device=device) as offload:
        check_next(subject)
        interrupt_at_a_held_copy(subject, device)
        when_main_is_in(_LoopThread._wait_until_ended, interrupt_then_let_go)
    assert offload.state == "closed"


SCENARIOS: list[Callable[[Subject, HeldCpuDevice], None]] = [
    in_each_block,
    between_blocks,
    waiting_for_a_block,
    waiting_for_a_copy,
    waiting_for_another_thread,
    out_of_the_context,
    while_opening,
    while_closing,
]


def run(scenario: Callable[[Subject, HeldCpuDevice], None]) -> None:
    """Run a scenario, and fail unless it leaves everything as it was."""
    subject, device = make_subject(), HeldCpuDevice()
    scenario(subject, device)
    subject.check_restored(device)


def main() -> None:
    run_scenarios({scenario.__name__: partial(run, scenario) for scenario in SCENARIOS})
