"""Admission: requests wait, the most urgent first, for the thread of a place to serve them.

A place is occupied by its own thread and by nobody else, so no caller can lose one, wherever an exception meets it: a
cancellation while it waits, an interrupt between two of its instructions. All that callers do is to put themselves into
the queue, and to say that they go, or that admission ends. To say so is a single call into C, which happens or does
not; what follows from it is done by the doorkeeper's thread, where no signal handler runs.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import anyio
import attrs

from streamflow.errors import OverloadedError
from streamflow.stages.errors import EngineClosedError
from streamflow.stages.places import Place
from streamflow.stages.ranks.signature import WaveNeed
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import WorkerThread, more_urgent, wait_through


class Occupant(Protocol):
    """What occupies a place. A place's thread calls `serve`, once, and then `over`; where admission is closed first,
    `refuse` and `over` are called. After `Admission.leave` came in time, only `over` is.
    """

    def serve(self, place: Place) -> None:
        """Use the place, and keep exceptions."""

    def refuse(self) -> None:
        """Take note that admission is closed."""

    def over(self) -> None:
        """Tell the caller: it has no place and waits for none, now and from here on."""


@attrs.define(eq=False)
class Turn:
    """An occupant's turn: it waits, has a place, and is over.

    Of those that wait, the highest ``priority`` comes first, and among equals whoever came first. Two turns that have
    an element of ``exclusive`` in common are not served at the same time.
    """

    occupant: Occupant
    number: int
    priority: int = 0
    request_id: str | None = None
    wave: WaveNeed | None = None
    exclusive: frozenset[int] = frozenset()
    waits: bool = True
    withdrawn: bool = False
    place: Place | None = None
    stopped_at: float | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """By which turns are sorted."""
        return (-self.priority, self.number)


@attrs.frozen
class Occupancy:
    """Who has a place and who waits for one, by request id (None: a direct call); the waiting ones in their order.

    ``longest_stop_s``: the longest that anybody needed to end after being told to stop.
    """

    running: tuple[str | None, ...]
    waiting: tuple[str | None, ...]
    longest_stop_s: float


class Admission:
    """Lets the places' threads serve occupants until `close`. ``clean`` runs in them after each; it must not fail.

    No more than ``max_waiting`` occupants wait while all places are occupied. ``doorkeeper`` is a thread for admission
    alone, until `cut`.
    """

    def __init__(
        self, places: Sequence[Place], clean: Callable[[Place], None], max_waiting: int, doorkeeper: WorkerThread
    ) -> None:
        goings: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        #: Give a turn up: withdraw the occupant if it still waits, else stop its forward (and no other one) at the next
        #: block boundary. Soon, and `Occupant.over` tells when. A single call into C. From any thread. Idempotent.
        self.leave: Callable[[Turn], None] = goings.put
        #: Admit nobody from here on, refuse those who wait and stop those who run; the same in every other respect.
        self.cut: Callable[[], None] = partial(goings.put, None)
        self._clean = clean
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._waiting: list[Turn] = []
        self._running: dict[int, Turn] = {}
        self._closed = False
        self._longest_stop_s = 0.0
        self._lock = threading.Lock()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = {place.index: LoopEvent() for place in places}
        for place in places:
            place.thread.submit(partial(self._work, place))
        doorkeeper.submit(partial(self._keep_door, goings))

    @property
    def num_running(self) -> int:
        """Places that are occupied."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Occupants that wait for one."""
        return len(self._waiting)

    def occupancy(self) -> Occupancy:
        """Who runs and who waits now. From any thread, a signal handler's too: it takes no lock."""
        running, waiting = list(self._running.values()), list(self._waiting)
        return Occupancy(
            tuple(turn.request_id for turn in running),
            tuple(turn.request_id for turn in waiting),
            self._longest_stop_s,
        )

    def enter(
        self,
        occupant: Occupant,
        *,
        priority: int = 0,
        request_id: str | None = None,
        wave: WaveNeed | None = None,
        exclusive: frozenset[int] = frozenset(),
    ) -> Turn:
        """Queue ``occupant``; see `Turn`. From any thread; never blocks.

        :raises EngineClosedError: if admission is closed.
        :raises OverloadedError: if as many wait as may.
        """
        turn = Turn(occupant, next(self._numbers), priority, request_id, wave, exclusive)
        try:
            with self._lock:
                self._check_room()
                insort(self._waiting, turn, key=lambda other: other.rank)
            self._wake()
        except BaseException:
            self.leave(turn)  # interrupted, perhaps with the turn in the queue: the caller knows nothing of it
            raise
        return turn

    def _check_room(self) -> None:
        if self._closed:
            raise EngineClosedError
        running, waiting = len(self._running), len(self._waiting)
        if running + waiting >= len(self._ended) + self._max_waiting:
            raise OverloadedError(running, waiting, self._max_waiting)

    def position(self, turn: Turn) -> int | None:
        """How many come before the turn, which waits; None if it does not wait (any more). From any thread."""
        waiting = list(self._waiting)
        return waiting.index(turn) if turn in waiting else None

    async def close(self, grace_s: float = 0.0) -> None:
        """Admit nobody from here on, serve those who run and wait for ``grace_s`` seconds at most, then `cut`; return
        once every place is free. Idempotent.

        A cancellation ends the time of grace; it, and what else interrupts the wait, is raised after all that. Only an
        interrupt at the one moment when nothing absorbs it comes out at once.
        """
        absorbed: BaseException | None = None
        try:
            self._closed = True
            self._wake()
            with anyio.move_on_after(grace_s):
                await self._all_ended()
        except BaseException as interruption:
            absorbed = interruption
        self.cut()
        another = await wait_through(*self._ended.values())
        absorbed = another if absorbed is None else more_urgent(absorbed, another)
        if absorbed is not None:
            raise absorbed

    async def _all_ended(self) -> None:
        for ended in self._ended.values():
            await ended.wait()

    # In the doorkeeper's thread

    def _keep_door(self, goings: queue.SimpleQueue[Turn | None]) -> None:
        while (turn := goings.get()) is not None:
            self._see_off(turn)
            del turn  # see `_work`
        self._refuse_and_stop()

    def _see_off(self, turn: Turn) -> None:
        with self._lock:
            waited = turn in self._waiting
            if waited:
                self._waiting.remove(turn)
                turn.waits, turn.withdrawn = False, True
            else:
                self._stop(turn)
        if waited:
            turn.occupant.over()

    def _stop(self, turn: Turn) -> None:
        if turn.place is not None:
            turn.stopped_at = turn.stopped_at or time.monotonic()
            turn.place.mailbox.stop()

    def _refuse_and_stop(self) -> None:
        with self._lock:
            self._closed = True
            refused, self._waiting = self._waiting, []
            for turn in refused:
                turn.waits = False
            for turn in self._running.values():
                self._stop(turn)
        self._wake()
        for turn in refused:
            turn.occupant.refuse()
            turn.occupant.over()

    # In the places' threads

    def _work(self, place: Place) -> None:
        try:
            while (turn := self._next(place)) is not None:
                self._serve(turn, place)
                turn.occupant.over()
                del turn  # it holds what the caller gave and got, and the next one may be hours away
        finally:
            self._ended[place.index].set()

    def _next(self, place: Place) -> Turn | None:
        """The turn that is next, which has the place now; blocks while there is none. None: there will be none."""
        while True:
            with self._lock:
                turn = self._take_first(place)
                is_over = turn is not None or (self._closed and not self._waiting)
            if is_over:
                self._wake()
                return turn
            self._wakes.get()

    def _wake(self) -> None:
        """Let a place that sleeps look for turns.

        A hint: whoever is awake looks before it sleeps. Who takes a turn, or ends, passes one on, because what kept
        others from serving the rest may be gone. As many as there are places wake them all, so more are not kept.
        """
        if self._wakes.qsize() < len(self._ended):
            self._wakes.put(None)

    def _take_first(self, place: Place) -> Turn | None:
        taken = frozenset[int]().union(*(turn.exclusive for turn in self._running.values()))
        turn = next((turn for turn in self._waiting if not turn.exclusive & taken), None)
        if turn is not None:
            self._waiting.remove(turn)
            turn.waits = False
            turn.place, place.request_id, place.wave = place, turn.request_id, turn.wave
            self._running[place.index] = turn
        return turn

    def _serve(self, turn: Turn, place: Place) -> None:
        try:
            turn.occupant.serve(place)
        finally:
            with self._lock:
                turn.place = None  # whoever gives the turn up from here on is too late to stop anything
            self._clean(place)
            with self._lock:
                if turn.stopped_at is not None:
                    self._longest_stop_s = max(self._longest_stop_s, time.monotonic() - turn.stopped_at)
                place.request_id = place.wave = None
                del self._running[place.index]
