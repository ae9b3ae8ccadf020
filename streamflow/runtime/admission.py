"""Admission: requests wait, first come first served, for a place. Callers may be tasks of any loop, or threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import attrs

from streamflow.stages.errors import EngineClosedError
from streamflow.stages.places import Place
from streamflow.stages.signals import LoopEvent, ThreadEvent
from streamflow.stages.threads import wait_through


class _Signal(Protocol):
    def set(self) -> None: ...


@attrs.define(eq=False)
class _Waiter:
    signal: _Signal
    place: Place | None = None


class Admission:
    """Hands out places. Every place handed out comes back through `release`."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._free = deque(places)
        self._num_places = len(places)
        self._waiters: deque[_Waiter] = deque()
        self._closed = False
        self._idle_signals: list[_Signal] = []
        self._lock = threading.Lock()

    @property
    def num_running(self) -> int:
        """Places that are occupied."""
        return self._num_places - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiters)

    async def acquire(self) -> Place:
        """A place of one's own. A cancelled call leaves none behind.

        :raises EngineClosedError: if admission is closed, or is closed meanwhile.
        """
        signal = LoopEvent()
        waiter = self._enqueue(signal)
        try:
            await signal.wait()
        except BaseException:
            self._withdraw(waiter)
            raise
        return self._granted(waiter)

    def acquire_blocking(self) -> Place:
        """The same for a thread.

        :raises EngineClosedError: if admission is closed, or is closed meanwhile.
        """
        signal = ThreadEvent()
        waiter = self._enqueue(signal)
        try:
            signal.wait_blocking()
        except BaseException:  # a signal handler's exception
            self._withdraw(waiter)
            raise
        return self._granted(waiter)

    def release(self, place: Place) -> None:
        """Give a place back; the longest-waiting request gets it. From any thread."""
        with self._lock:
            self._free.append(place)
            self._grant()
            if self.num_running == 0:
                for signal in self._idle_signals:
                    signal.set()

    def close(self) -> None:
        """Admit nobody from here on; those who wait get an error. Idempotent."""
        with self._lock:
            self._closed = True
            for waiter in self._waiters:
                waiter.signal.set()
            self._waiters.clear()

    async def wait_idle(self) -> None:
        """Return once every place is free, whatever cancels come meanwhile."""
        signal = LoopEvent()
        with self._lock:
            if self.num_running == 0:
                return
            self._idle_signals.append(signal)
        await wait_through(signal)

    def _enqueue(self, signal: _Signal) -> _Waiter:
        waiter = _Waiter(signal)
        with self._lock:
            if self._closed:
                raise EngineClosedError
            self._waiters.append(waiter)
            self._grant()
        return waiter

    def _grant(self) -> None:
        while self._free and self._waiters:
            waiter = self._waiters.popleft()
            waiter.place = self._free.popleft()
            waiter.signal.set()

    def _withdraw(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if waiter.place is not None:
            self.release(waiter.place)

    def _granted(self, waiter: _Waiter) -> Place:
        if waiter.place is None:
            raise EngineClosedError
        return waiter.place
