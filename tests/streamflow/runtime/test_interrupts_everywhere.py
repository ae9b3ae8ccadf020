"""An interrupt at every instruction of ours at which Python may raise one, in what the main thread calls.

Python looks for signals where a function begins, after calls into C, and where loops jump back: nowhere else.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import streamflow
from streamflow.facade import _LoopThread
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.runtime.kit import make_subject

pytestmark = [pytest.mark.timeout(110), pytest.mark.slow]

#: Instructions after which Python looks for signals, unless they called a Python function.
LOOKS_AFTER = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD")
PACKAGE = Path(streamflow.__file__).resolve().parent
FOLDERS = (str(PACKAGE), str((PACKAGE / "stages").resolve()))


@functools.cache
def is_ours(file: str) -> bool:
    """Whether that is a file of the package, by whatever link it is reached."""
    return str(Path(file).resolve()).startswith(FOLDERS)


class Interrupter:
    """A trace function that raises KeyboardInterrupt at the k-th such instruction in our code."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._num = 0
        self._last: dict[FrameType, str] = {}
        self._came_back: set[FrameType] = set()
        self.raised_at: str | None = None

    def trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """What `sys.settrace` wants: it is called for each function that begins."""
        if event != "call" or not is_ours(frame.f_code.co_filename):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._look(frame)
        return self._trace_inside

    def _trace_inside(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "return":
            self._last.pop(frame, None)
            if frame.f_back is not None:
                self._came_back.add(frame.f_back)
        elif event == "opcode":
            last = self._last.get(frame)
            called_python = frame in self._came_back
            self._came_back.discard(frame)
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last in LOOKS_AFTER and not called_python:
                self._look(frame)
        return self._trace_inside

    def _look(self, frame: FrameType) -> None:
        self._num += 1
        if self._num == self._k:
            self.raised_at = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            sys.settrace(None)
            raise KeyboardInterrupt


class SecondInterrupter:
    """A profile function that raises another, ``then`` such instructions after the first; jumps back do not count.

    Python lets a trace function raise once: it is gone after that.
    """

    def __init__(self, first: Interrupter, then: int) -> None:
        self._first = first
        self._left = then

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """What `sys.setprofile` wants: it is called where functions begin and end, also those in C."""
        if self._first.raised_at is not None and event in ("call", "c_return") and is_ours(frame.f_code.co_filename):
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


@contextmanager
def traced(interrupter: Interrupter, then: int | None = None) -> Iterator[None]:
    """Let it interrupt what runs meanwhile, and again ``then`` such instructions later (None: not again)."""
    before = sys.gettrace(), sys.getprofile()
    sys.setprofile(None if then is None else SecondInterrupter(interrupter, then).profile)
    sys.settrace(interrupter.trace)
    try:
        yield
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])


OPTIONS: list[dict[str, Any]] = [
    {"poison_freed_slots": True},
    {"transfer": "staged", "packing_threads": 1, "window_blocks": 1, "resident_blocks": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["direct", "staged-one-slot"])
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
