"""Lets one request at a time into a model that keeps state between calls; finds out whether it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
from torch import nn

from streamflow.binding.module_state import Snapshot, Stateful

#: Forwards that are watched: the first may fill caches that are then only read.
NUM_WATCHED = 2
#: How often a thread that has to wait looks whether it may go on, or must stop, in seconds.
_POLL_S = 0.005


@attrs.frozen(eq=False)
class ComponentGate:
    """The gate of one component. ``lasts``: a request that entered keeps it until it ends, else until it calls another
    component.
    """

    gate: StateGate
    lasts: bool


class Holding:
    """Which request holds gates: one at a time, as many as it needs. Were they held by several, these could wait for
    each other's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._gates: set[int] = set()

    def take(self, gate: StateGate) -> bool:
        """Whether the calling thread's request holds ``gate`` from now on, or did before."""
        with self._lock:
            if self._holder not in (None, threading.get_ident()):
                return False
            self._holder = threading.get_ident()
            self._gates.add(id(gate))
            return True

    def leave(self, gate: StateGate) -> None:
        """The calling thread's request does not hold ``gate`` any more. Idempotent."""
        with self._lock:
            if self._holder == threading.get_ident():
                self._gates.discard(id(gate))
                if not self._gates:
                    self._holder = None


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
    def forward(self, check: Callable[[], object]) -> Iterator[bool]:
        """A forward, in the thread of its request; first it waits for its turn, which lasts until `leave`. ``check``
        raises if it must not wait any more. Gives whether nobody else may be in the model meanwhile.
        """
        if self.is_open:
            yield False
            return
        self.enter(check)
        before = Snapshot(self._model, self._ignored) if self._num_watched < NUM_WATCHED else None
        yield True
        if before is not None:
            self._judge(before)

    def enter(self, check: Callable[[], object]) -> None:
        """Wait for the turn of the calling thread's request, ahead of its forwards."""
        while not self._take():
            check()
            time.sleep(_POLL_S)

    def _take(self) -> bool:
        return self.is_open or self._holding.take(self)

    def _judge(self, before: Snapshot) -> None:
        if self._num_watched + 1 == NUM_WATCHED:
            self.stateful = tuple(before.changed(Snapshot(self._model, self._ignored)))
        self._num_watched += 1  # last: others look at both
        if self.is_open:
            self.leave()

    def leave(self) -> None:
        """The calling thread's request is over. Idempotent."""
        self._holding.leave(self)
