"""The event log: every event of the engine as a line of JSON, with the time since the log was opened."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
from anyio.streams.memory import MemoryObjectReceiveStream

from streamflow.runtime.offload import Offload
from streamflow.runtime.statistics import OffloadStatistics
from streamflow.stages.events import FetchStarted, ObservedEvent, PassEnded, PassStarted

#: Lines that are kept before they are written together, off the loop.
BATCH_LINES = 256
#: Events that may wait meanwhile.
CAPACITY_EVENTS = 1 << 16
#: How long, at most, to wait for the end of a pass whose forward has returned.
LAST_EVENTS_S = 5.0


class EventLog:
    """The log of an open offload. Made by `open_event_log`.

    ``counts`` are the events by kind, ``fetched_bytes`` the sum over `FetchStarted`.
    """

    def __init__(self, offload: Offload, events: MemoryObjectReceiveStream[ObservedEvent]) -> None:
        self.counts: Counter[str] = Counter()
        self.fetched_bytes = 0
        self.statistics: OffloadStatistics = offload.statistics()
        self._before = self.statistics.engine
        self._offload = offload
        self._events = events
        self._lines: list[str] = []
        self._failure: OSError | None = None
        self._quiet = anyio.Event()
        self._started = time.perf_counter()

    @property
    def num_lost(self) -> int:
        """Events that are not in the log although the engine published, or must have published, them."""
        engine = self.statistics.engine
        missing_fetches = engine.num_fetches - self._before.num_fetches - self.counts[FetchStarted.__name__]
        missing_passes = engine.num_passes - self._before.num_passes - self.counts[PassStarted.__name__]
        return max(engine.num_dropped_events, missing_fetches + missing_passes)

    async def follow(self, file: anyio.AsyncFile[str]) -> None:
        """Log to ``file`` what comes, until cancelled. A failure to write is kept for `finish`."""
        try:
            async for event in self._events:
                self._note(event)
                if len(self._lines) >= BATCH_LINES:
                    await self._write(file)
        except OSError as failure:
            self._failure = failure

    async def wait_quiet(self) -> None:
        """Return once no pass is under way, as far as the log knows, or after a few seconds."""
        with anyio.move_on_after(LAST_EVENTS_S):
            while self._num_open_passes:
                self._quiet = anyio.Event()
                await self._quiet.wait()

    def catch_up(self) -> None:
        """Log all that was published up to now, and take the ``statistics`` of the same moment."""
        self.statistics = self._offload.statistics()
        while self._events.statistics().current_buffer_used:
            self._note(self._events.receive_nowait())

    async def finish(self, file: anyio.AsyncFile[str]) -> None:
        """Write the rest.

        :raises OSError: if not all of the log could be written.
        """
        if self._failure is not None:
            raise self._failure
        await self._write(file)

    @property
    def _num_open_passes(self) -> int:
        return self.counts[PassStarted.__name__] - self.counts[PassEnded.__name__]

    def _note(self, event: ObservedEvent) -> None:
        self.counts[type(event).__name__] += 1
        if isinstance(event, FetchStarted):
            self.fetched_bytes += event.nbytes
        self._lines.append(json.dumps(describe(event, time.perf_counter() - self._started)))
        if not self._num_open_passes:
            self._quiet.set()

    async def _write(self, file: anyio.AsyncFile[str]) -> None:
        lines, self._lines = self._lines, []
        with anyio.CancelScope(shield=True):  # a batch that was taken is written
            await file.write("".join(f"{line}\n" for line in lines))


def describe(event: ObservedEvent, time_s: float) -> dict[str, Any]:
    """``event`` in plain values, ``time_s`` seconds after the log began; without device events, which have none."""
    names = [field.name for field in attrs.fields(type(event)) if field.name != "event"]
    values = {name: getattr(event, name) for name in names}
    plain = {name: repr(value) if isinstance(value, BaseException) else value for name, value in values.items()}
    return {"time_s": round(time_s, 6), "kind": type(event).__name__, **plain}


@asynccontextmanager
async def open_event_log(offload: Offload, path: Path) -> AsyncIterator[EventLog]:
    """Logs the events of ``offload`` to ``path`` while it is open, by a task of its own.

    Once it has closed, the file and ``statistics`` of the log speak of the same moment.

    :raises OSError: if the file cannot be written.
    """
    failure: BaseException | None = None
    with offload.observe(CAPACITY_EVENTS) as events:
        log = EventLog(offload, events)
        async with await anyio.open_file(path, "w", encoding="utf-8") as file:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(log.follow, file, name="event log")
                try:
                    yield log
                    await log.wait_quiet()
                except BaseException as error:
                    failure = error  # raised below, outside the task group, so that it is not wrapped
                finally:
                    tasks.cancel_scope.cancel()
            log.catch_up()
            if failure is None:
                await log.finish(file)
    if failure is not None:
        raise failure
