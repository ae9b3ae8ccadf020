"""Places: what one running request occupies, a worker thread and a compute stream, made at opening and reused."""

from __future__ import annotations

import time
from collections import deque

import attrs

from streamflow.stages.devices.base import Event, Stream
from streamflow.stages.mailbox import Mailbox
from streamflow.stages.ranks.signature import WaveNeed
from streamflow.stages.threads import WorkerThread
from streamflow.stages.timing import PlaceWatch


@attrs.define
class WaitTimes:
    """Where compute threads stood still, in seconds of host time.

    ``mailbox_s``: the block's fetch was not issued yet. ``event_s``: on a host device, the copy was not done yet (an
    accelerator waits by itself). ``run_ahead_s``: the thread was as far ahead of the device as it may be.
    """

    mailbox_s: float = 0.0
    event_s: float = 0.0
    run_ahead_s: float = 0.0
    num_mailbox_waits: int = 0
    num_blocks: int = 0
    hooks_cpu_s: float = 0.0

    def add(self, other: WaitTimes) -> None:
        """Add ``other`` to this, field by field."""
        for field in attrs.fields(WaitTimes):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Place:
    """A worker thread, a compute stream and a mailbox. One request at a time occupies it, ``request_id`` if it has one;
    ``wave`` is what it said of the wave that it needs (None: nothing).

    A request that brings its own thread (a direct call of the model) uses the stream and the mailbox from there.
    ``watch`` is told what happens here; None: nobody wants to know.
    """

    def __init__(self, index: int, stream: Stream, thread: WorkerThread, run_ahead_blocks: int) -> None:
        self.index = index
        self.stream = stream
        self.thread = thread
        self.mailbox = Mailbox()
        self.waits = WaitTimes()
        self.request_id: str | None = None
        self.wave: WaveNeed | None = None
        self.watch: PlaceWatch | None = None
        self._run_ahead_blocks = run_ahead_blocks
        self._issued: deque[Event] = deque()

    def note_issued(self, event: Event) -> None:
        """Take note of a block's work, done when ``event`` happens."""
        self._issued.append(event)

    def keep_pace(self) -> None:
        """Wait, in the compute thread, if the device is further behind than allowed, until it is half as far behind.

        Half as far: a thread that sleeps at every block finds its caches cold at every block.
        """
        if len(self._issued) <= self._run_ahead_blocks:
            return
        started = time.perf_counter()
        while len(self._issued) > (self._run_ahead_blocks + 1) // 2:
            earlier = self._issued.popleft()
        earlier.wait()
        self.waits.run_ahead_s += time.perf_counter() - started
        if self.watch is not None:
            self.watch.waited("run_ahead", None, started)

    def settle(self) -> None:
        """Wait, in a thread, until the device has done all that this place issued."""
        event = self.stream.record()
        self._issued.clear()
        event.wait()
