"""Observers of the engine: bounded, and never in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from streamflow.stages.events import ObservedEvent

#: Events an observer may lag behind before it loses the newest.
DEFAULT_CAPACITY = 4096
#: Classes of events; None stands for all.
Kinds = tuple[type, ...] | None


class Broadcast:
    """Tells every observer of every event, without waiting for any. On the loop only."""

    def __init__(self) -> None:
        self._subscriptions: dict[MemoryObjectSendStream[ObservedEvent], Kinds] = {}
        self._listeners: tuple[Callable[[ObservedEvent], None], ...] = ()
        self._num_dropped = 0

    @property
    def is_observed(self) -> bool:
        """Whether anybody listens: publishers may skip making events when nobody does."""
        return bool(self._subscriptions or self._listeners)

    @property
    def num_dropped(self) -> int:
        """Events that observers who lagged behind have lost, those of former observers included."""
        return self._num_dropped

    def publish(self, event: ObservedEvent) -> None:
        """Hand ``event`` to each observer that has room; for the others it is counted as dropped."""
        for listener in self._listeners:
            listener(event)
        for send, kinds in self._subscriptions.items():
            if kinds is None or isinstance(event, kinds):
                self._send(send, event)

    def _send(self, send: MemoryObjectSendStream[ObservedEvent], event: ObservedEvent) -> None:
        try:
            send.send_nowait(event)
        except (anyio.WouldBlock, anyio.BrokenResourceError):
            self._num_dropped += 1

    @contextmanager
    def subscribe(
        self, capacity: int = DEFAULT_CAPACITY, kinds: Kinds = None
    ) -> Iterator[MemoryObjectReceiveStream[ObservedEvent]]:
        """A channel of all events from here on; it ends when the engine closes. ``capacity`` is in events.

        ``kinds``: only events of these classes; None: all.
        """
        send, receive = anyio.create_memory_object_stream[ObservedEvent](capacity)
        self._subscriptions[send] = kinds
        try:
            yield receive
        finally:
            self._subscriptions.pop(send, None)
            send.close()
            receive.close()

    def listen(self, listener: Callable[[ObservedEvent], None]) -> None:
        """Call ``listener`` with every event from here on, at once, on the loop: it must neither fail nor take long."""
        self._listeners += (listener,)

    def close(self) -> None:
        """End every channel. Idempotent."""
        for send in self._subscriptions:
            send.close()
        self._subscriptions.clear()
