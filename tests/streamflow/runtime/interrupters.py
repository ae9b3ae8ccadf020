"""What interrupts the main thread at a given instruction of ours, of those at which Python may raise an interrupt.

Python looks for signals where a function begins, after calls into C, and where loops jump back: nowhere else.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import streamflow

#: Instructions after which Python looks for signals, unless they called a Python function.
LOOKS_AFTER = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD")
PACKAGE = Path(streamflow.__file__).resolve().parent
FOLDERS = (str(PACKAGE), str((PACKAGE / "stages").resolve()))


@functools.cache
def is_ours(file: str) -> bool:
    """Whether that is a file of the package, by whatever link it is reached."""
    return str(Path(file).resolve()).startswith(FOLDERS)


def begins(frame: FrameType) -> bool:
    """Whether a function that is called begins, or a generator goes on; not a coroutine after an ``await``."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return dis.opname[code[at]] == "RESUME" and code[at + 1] & 3 < 2


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
        if begins(frame):
            self._look(frame)
        return self._trace_inside

    def _trace_inside(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "return":
            self._last.pop(frame, None)
            if frame.f_back is not None:
                self._came_back.add(frame.f_back)
        elif event == "opcode":
            last = self._last.get(frame)
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            called_python = frame in self._came_back or name == "GET_AWAITABLE"
            self._came_back.discard(frame)
            self._last[frame] = name
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
            if event == "call" and not begins(frame):
                return
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
