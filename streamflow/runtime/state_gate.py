"""Lets one request at a time into a model that keeps state between calls; finds out whether it does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
from torch import nn

from streamflow.binding.module_state import Snapshot, Stateful
from streamflow.stages.mailbox import Mailbox

#: Forwards that are watched: the first may fill caches that are then only read.
NUM_WATCHED = 2


@attrs.frozen(eq=False)
class ComponentGate:
    """The gate of one component. ``lasts``: a request that entered keeps it until it ends, else until it calls another
    component.
    """

    gate: StateGate
    lasts: bool


class Holding:
    """Which request holds gates: one at a time, as many as it needs. Were they held by several, these could wait for
    each other's. Those who wait get them in the order in which they came.

    What an interrupt tears here, `leave` mends: every request calls it in the end, for each gate.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._gates: set[int] = set()
        self._waiting: dict[int, Mailbox] = {}  # by thread, in their order

    def take(self, gate: StateGate, mailbox: Mailbox) -> bool:
        """Whether the calling thread's request holds ``gate`` from now on, or did before. Else it waits from now on,
        and ``mailbox`` is rung whenever it is worth another try.
        """
        me = threading.get_ident()
        with self._lock:
            if self._holder != me:
                self._waiting.setdefault(me, mailbox)
                if self._holder is not None or next(iter(self._waiting)) != me:
                    return False
                self._holder = me
                del self._waiting[me]
            self._gates.add(id(gate))
            return True

    def stop_waiting(self) -> None:
        """The calling thread waits no more. Idempotent."""
        with self._lock:
            if self._waiting.pop(threading.get_ident(), None) is None:
                return
        self._ring()

    def leave(self, gate: StateGate) -> None:
        """The calling thread's request does not hold ``gate`` any more, nor wait for one. Idempotent."""
        me = threading.get_ident()
        with self._lock:
            self._waiting.pop(me, None)
            if self._holder == me:
                self._gates.discard(id(gate))
                if not self._gates:
                    self._holder = None
        self._ring()  # in any case: an earlier call may have been interrupted before it

    def _ring(self) -> None:
        # all of them: the gate may be open now, and those who wait are no more than there are places
        with self._lock:
            waiting = tuple(self._waiting.values())
        for mailbox in waiting:
            mailbox.ring()


class StateGate:
    """A request that calls the model has it for itself until it ends, where the model is ``stateful``.

    Otherwise (``watched``) the first request has it for itself for two forwards. Where the second one still changes
    attributes, the model is stateful from then on; else everybody may call it at any time.

    Gates that a request keeps while it goes on to others need one ``holding`` in common.
    """

    def __init__(
        self,
        model: nn.Module,
        stateful: Sequence[Stateful],
        ignored: frozenset[int],
        holding: Holding,
        *,
        watched: bool,
    ) -> None:
        self._model = model
        self._ignored = ignored
        self._holding = holding
        self._num_watched = 0 if watched else NUM_WATCHED
        self.stateful = tuple(stateful)

    @property
    def is_open(self) -> bool:
        """Whether requests may be in the model together."""
        return not self.stateful and self._num_watched >= NUM_WATCHED

    @contextmanager
    def forward(self, mailbox: Mailbox) -> Iterator[bool]:
        """A forward, in the thread of its request, whose place has ``mailbox``; first `enter` waits for its turn, which
        lasts until `leave`. Gives whether nobody else may be in the model meanwhile.
        """
        if self.is_open:
            yield False
            return
        self.enter(mailbox)
        before = Snapshot(self._model, self._ignored) if self._num_watched < NUM_WATCHED else None
        yield True
        if before is not None:
            self._judge(before)

    def enter(self, mailbox: Mailbox) -> None:
        """Wait for the turn of the calling thread's request, ahead of its forwards.

        :raises StopForward: if the request is stopped.
        :raises EngineBrokenError: if the engine failed.
        :raises EngineClosedError: if the engine is closed.
        """
        try:
            mailbox.wait_until(lambda: self.is_open or self._holding.take(self, mailbox))
        finally:
            self._holding.stop_waiting()

    def _judge(self, before: Snapshot) -> None:
        if self._num_watched + 1 == NUM_WATCHED:
            self.stateful = tuple(before.changed(Snapshot(self._model, self._ignored)))
        self._num_watched += 1  # last: others look at both
        if self.is_open:
            self.leave()

    def leave(self) -> None:
        """The calling thread's request is over. Idempotent."""
        self._holding.leave(self)
