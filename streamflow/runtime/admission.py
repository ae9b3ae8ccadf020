"""Admission: requests wait, first come first served, for the thread of a place to serve them.

A place is occupied by its own thread and by nobody else, so no caller can lose one, wherever an exception meets it: a
cancellation while it waits, an interrupt between two of its instructions. All that callers do is to put themselves into
the queue, and to say that they go.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import attrs

from streamflow.stages.errors import EngineClosedError
from streamflow.stages.places import Place
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import more_urgent, wait_through


class Occupant(Protocol):
    """What occupies a place. A place's thread calls `serve` or `refuse`, once, and then `over`; after `Admission.leave`
    came in time, nothing.
    """

    def serve(self, place: Place) -> None:
        """Use the place, and keep exceptions."""

    def refuse(self) -> None:
        """Take note that admission is closed."""

    def over(self) -> None:
        """Tell the caller, now that the place is free again."""


@attrs.define(eq=False)
class Turn:
    """An occupant's turn: it waits, has a place, and is over."""

    occupant: Occupant
    waits: bool = True
    place: Place | None = None


class Admission:
    """Lets the places' threads serve occupants until `drain`. ``clean`` runs in them after each; it must not fail."""

    def __init__(self, places: Sequence[Place], clean: Callable[[Place], None]) -> None:
        self._clean = clean
        self._arrivals: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._num_gone = 0
        self._running: dict[int, Turn] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._ended = {place.index: LoopEvent() for place in places}
        for place in places:
            place.thread.submit(partial(self._work, place))

    @property
    def num_running(self) -> int:
        """Places that are occupied."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Occupants that wait for one."""
        return 0 if self._closed else max(0, self._arrivals.qsize() - self._num_gone)

    def enter(self, occupant: Occupant) -> Turn:
        """Queue ``occupant``. From any thread; never blocks.

        :raises EngineClosedError: if admission is closed.
        """
        turn = Turn(occupant)
        if not self._closed:
            self._arrivals.put(turn)
            # closed meanwhile: perhaps no place looks into the queue any more, perhaps one refuses right now
            if not self._closed or not self.leave(turn):
                return turn
        raise EngineClosedError

    def leave(self, turn: Turn) -> bool:
        """Give the turn up: withdraw the occupant if it still waits, else stop its forward (and no other one) at the
        next block boundary. Returns whether it waited.
        """
        with self._lock:
            if turn.waits:
                turn.waits = False
                self._num_gone += 1
                return True
            if turn.place is not None:
                turn.place.mailbox.stop()
            return False

    async def drain(self) -> None:
        """Refuse everyone from here on, stop those who are served, and return once every place is free. Idempotent.

        What interrupts the wait is raised after it.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            running = tuple(self._running.values())
        for turn in running:
            self.leave(turn)
        if first:
            for _ in self._ended:
                self._arrivals.put(None)
        absorbed: BaseException | None = None
        for ended in self._ended.values():
            interruption = await wait_through(ended)
            absorbed = interruption if absorbed is None else more_urgent(absorbed, interruption)
        if absorbed is not None:
            raise absorbed

    # In the places' threads

    def _work(self, place: Place) -> None:
        try:
            while (turn := self._arrivals.get()) is not None:
                self._take(turn, place)
                del turn  # it holds what the caller gave and got, and the next one may be hours away
        finally:
            self._ended[place.index].set()

    def _take(self, turn: Turn, place: Place) -> None:
        with self._lock:
            if not turn.waits:
                self._num_gone -= 1
                return
            turn.waits = False
            refused = self._closed
            if not refused:
                self._running[place.index] = turn
                turn.place = place
        if refused:
            turn.occupant.refuse()
        else:
            self._serve(turn, place)
        turn.occupant.over()

    def _serve(self, turn: Turn, place: Place) -> None:
        try:
            turn.occupant.serve(place)
        finally:
            with self._lock:
                turn.place = None  # whoever gives the turn up from here on is too late to stop anything
            self._clean(place)
            del self._running[place.index]
