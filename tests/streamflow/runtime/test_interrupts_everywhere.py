"""An interrupt at every instruction of ours at which Python may raise one, in what the main thread calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import streamflow
from streamflow.facade import _LoopThread
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.runtime.interrupters import Interrupter, traced
from tests.streamflow.runtime.kit import make_subject

pytestmark = [pytest.mark.timeout(110), pytest.mark.slow]

OPTIONS: list[dict[str, Any]] = [
    {"poison_freed_slots": True},
    {"transfer": "staged", "packing_threads": 1, "window_blocks": 1, "resident_blocks": 1},
    {"stateful_modules": ("blocks.1",)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["direct", "staged-one-slot", "with-state"])
def test_a_forward_interrupted_anywhere_leaves_the_next_exact(options: dict[str, Any]) -> None:
    subject = make_subject(num_blocks=3)
    device = CpuDevice()
    with streamflow.offload(subject.model, options, device=device) as offload:
        k = 0
        while True:
            k += 1
            interrupter = Interrupter(k)
            try:
                with traced(interrupter):
                    output = subject.forward()
            except KeyboardInterrupt:
                assert interrupter.raised_at is not None
            else:
                assert interrupter.raised_at is None, f"the interrupt was lost: {interrupter.raised_at}"
                assert output == subject.expected
                break
            where = f"after an interrupt at {interrupter.raised_at} (number {k})"
            assert subject.forward() == subject.expected, f"not exact {where}"
            statistics = offload.statistics()
            assert (statistics.num_running, statistics.num_waiting) == (0, 0), f"a place was lost {where}"
    assert k > 100
    subject.check_restored(device)


@pytest.mark.parametrize("then", [None, 1, 2, 3, 5])
def test_a_closing_interrupted_anywhere_closes_all_the_same(then: int | None) -> None:
    """Also twice, one right after the other: the second comes while the first is dealt with."""
    subject, device = make_subject(num_blocks=1), CpuDevice()
    for k in itertools.count(1):
        interrupter = Interrupter(k)
        entered = streamflow.offload(subject.model, device=device)
        offload = entered.__enter__()
        try:
            with traced(interrupter, then):
                entered.__exit__(None, None, None)
        except KeyboardInterrupt:
            assert interrupter.raised_at is not None
        else:
            assert interrupter.raised_at is None, f"the interrupt was lost: {interrupter.raised_at}"
        assert offload.state == "closed", f"not closed after an interrupt at {interrupter.raised_at} (number {k})"
        subject.check_restored(device)
        if interrupter.raised_at is None:
            break
    assert k > 10


def test_a_second_interrupt_in_the_one_moment_that_absorbs_none_closes_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is that of the jump back to the wait, after the first."""
    subject, device = make_subject(num_blocks=1), CpuDevice()
    original = _LoopThread.close_through
    num_interrupts = 0

    def close_through(thread: _LoopThread) -> KeyboardInterrupt | None:
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts == 1:
            raise KeyboardInterrupt
        return original(thread)

    monkeypatch.setattr(_LoopThread, "close_through", close_through)
    with pytest.raises(KeyboardInterrupt), streamflow.offload(subject.model, device=device) as offload:
        subject.forward()
    assert offload.state == "closed"
    subject.check_restored(device)
