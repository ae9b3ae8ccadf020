"""For programs that interrupt themselves (SIGINT, as by Ctrl-C) wherever their main thread waits."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import attrs
import torch

from streamflow.stages.images import MemoryPiece
from streamflow.stages.mailbox import Mailbox
from tests.streamflow.runtime.kit import PATIENCE_S, wait_for


def interrupt() -> None:
    """Send SIGINT to this process."""
    os.kill(os.getpid(), signal.SIGINT)


def in_daemon(action: Callable[[], object]) -> threading.Thread:
    """Call ``action`` in a thread that does not keep the process alive."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def interrupt_from_elsewhere() -> None:
    """Have another thread interrupt the calling one, the main thread, which waits for that."""
    in_daemon(interrupt)
    threading.Event().wait(PATIENCE_S)
    raise AssertionError("no interrupt came")


def when_main_is_in(function: Callable[..., object], action: Callable[[], object]) -> threading.Thread:
    """Call ``action``, in a thread, once the main thread is in ``function`` or in something that it calls."""
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        pause = threading.Event()
        while not is_in(sys._current_frames()[main]):
            pause.wait(0.001)
        action()

    def is_in(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is function.__code__:
                return True
            frame = frame.f_back
        return False

    return in_daemon(watch)


@contextmanager
def interrupted() -> Iterator[None]:
    """Fail unless KeyboardInterrupt comes out, itself and not in a group."""
    try:
        yield
    except KeyboardInterrupt:
        return
    raise AssertionError("no KeyboardInterrupt came out")


@contextmanager
def replaced(owner: type, name: str, replacement: object) -> Iterator[None]:
    """A method of a class is another one meanwhile."""
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@attrs.frozen
class Gate:
    """``reached``: somebody waits before it. ``open``: nobody waits any more."""

    reached: threading.Event = attrs.field(factory=threading.Event)
    open: threading.Event = attrs.field(factory=threading.Event)


@contextmanager
def gated_reads() -> Iterator[Gate]:
    """Every read of a weight in memory waits for the gate that this yields."""
    gate = Gate()
    original = MemoryPiece.read_into

    def read_into(piece: MemoryPiece, address: int, start: int, nbytes: int) -> None:
        gate.reached.set()
        wait_for(gate.open)
        original(piece, address, start, nbytes)

    with replaced(MemoryPiece, "read_into", read_into):
        try:
            yield gate
        finally:
            gate.open.set()


def until_told_to_stop(action: Callable[[], object]) -> None:
    """Call ``action``, in a request's thread, and return when the request has been told to stop."""
    told = threading.Event()
    original = Mailbox.stop

    def stop(mailbox: Mailbox) -> None:
        original(mailbox)
        told.set()

    with replaced(Mailbox, "stop", stop):
        action()
        wait_for(told)


def run_scenarios(scenarios: Mapping[str, Callable[[], object]]) -> None:
    """Run all, and print a line for each: its name, and ``ok`` or what went wrong. One that hangs ends the process."""
    torch.set_num_threads(1)
    for name, scenario in scenarios.items():
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        try:
            scenario()
        except BaseException:
            print(name, repr(traceback.format_exc()), flush=True)  # noqa: T201 - a program
        else:
            print(name, "ok", flush=True)  # noqa: T201
    faulthandler.cancel_dump_traceback_later()
