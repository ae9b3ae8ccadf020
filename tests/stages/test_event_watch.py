"""Whoever asks is told of an event, in a thread that is there once somebody asks, also of one whose work failed."""

from __future__ import annotations

import threading
from functools import partial

import attrs
import pytest

from streamflow.stages.errors import DeviceStreamError
from streamflow.stages.event_watch import EventWatch
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import WorkerThread, open_threads

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@attrs.frozen(eq=False)
class Event:
    """It happens when it is let, and raises ``failure`` to who waits for it (None: nothing)."""

    failure: Exception | None = None
    happened: threading.Event = attrs.field(factory=threading.Event)

    def is_done(self) -> bool:
        return self.happened.is_set()

    def wait(self) -> None:
        assert self.happened.wait(60)
        if self.failure is not None:
            raise self.failure


async def test_each_is_told_once_its_event_has_happened_and_in_their_order() -> None:
    opened, told, all_told = list[WorkerThread](), list[tuple[str, str]](), LoopEvent()

    def tell(name: str) -> None:
        told.append((name, threading.current_thread().name))

    async with open_threads() as crew:

        def open_thread() -> WorkerThread:
            opened.append(crew.start("streamflow test"))
            return opened[-1]

        watch = EventWatch(open_thread)
        assert not opened, "nobody has asked yet"
        events = [Event(), Event(DeviceStreamError("copy", OSError("the link is down"))), Event()]
        for name, event in zip("abc", events, strict=True):
            watch.when_happened(event, partial(tell, name))
        watch.when_happened(events[2], all_told.set)
        for event in reversed(events):
            assert not told
            event.happened.set()
        await all_told.wait()
    assert told == [(name, "streamflow test") for name in "abc"]
    assert len(opened) == 1
    assert opened[0].failure is None
