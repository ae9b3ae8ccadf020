"""Thread-safe wake-ups of an event loop: the doorbell (many messages) and the loop event (one).

Both go through the loop's own entry point for other threads (trio: ``run_sync_soon``, asyncio:
``call_soon_threadsafe``). Nothing waits for the loop, and the callback can only append and set: an exception in it
would take the host's loop down.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel

Message = TypeVar("Message")


def loop_waker() -> Callable[[Callable[[], object]], bool]:
    """A function that runs a callback on the current loop, from any thread; it returns False once the loop is gone.

    :raises anyio.NoEventLoopError: if no event loop runs in this thread.
    """
    token: Any = anyio.lowlevel.current_token().native_token
    call = token.run_sync_soon if hasattr(token, "run_sync_soon") else token.call_soon_threadsafe

    def wake(callback: Callable[[], object]) -> bool:
        try:
            call(callback)
        except Exception:  # trio.RunFinishedError, or asyncio's bare RuntimeError
            return False
        return True

    return wake


class Doorbell(Generic[Message]):
    """Messages from compute threads to one task of the loop that made it.

    `ring` never blocks and never fails. Its bound is the number of messages that the ringing passes can have
    outstanding: each pass rings at most three times a block and runs at most ``run_ahead_blocks`` ahead.
    """

    def __init__(self) -> None:
        self._wake_loop = loop_waker()
        self._messages: deque[Message] = deque()
        self._wake_pending = False
        self._arrived = anyio.Event()
        self._closed = False
        self.num_late = 0

    def ring(self, message: Message) -> None:
        """Leave ``message`` and wake the loop. From any thread. A late one, after `close`, is counted and dropped."""
        if self._closed:
            self.num_late += 1
            return
        self._messages.append(message)
        if not self._wake_pending:
            self._wake_pending = True
            try:
                delivered = self._wake_loop(self._on_wake)
            except BaseException:  # of a signal handler, in a thread that is no request: the next ring wakes the loop
                self._wake_pending = False
                raise
            if not delivered:  # the loop is gone: nobody will ever ask for the messages
                self.close()
                self.num_late += 1

    def _on_wake(self) -> None:
        # First the flag, then the event: a ring that comes in between wakes the loop once too often, never too seldom.
        self._wake_pending = False
        self._arrived.set()

    async def wait(self) -> list[Message]:
        """All messages so far, at least one, oldest first. A cancelled call leaves the messages where they are."""
        while not self._messages:
            await self._arrived.wait()
            self._arrived = anyio.Event()
        await anyio.lowlevel.checkpoint_if_cancelled()
        return self._drain()

    async def wait_until(self, deadline: float) -> list[Message]:
        """All messages so far, oldest first; none if none has come by ``deadline``, in the loop's time.

        What a busy loop finds together, the deadline and messages, it is told of together.
        """
        with anyio.CancelScope(deadline=deadline):
            return await self.wait()
        return self._drain()

    def _drain(self) -> list[Message]:
        messages: list[Message] = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def close(self) -> None:
        """Drop what comes from here on. Idempotent."""
        self._closed = True
        self._messages.clear()


class LoopEvent:
    """A one-shot event that any thread sets and the loop that made it awaits."""

    def __init__(self) -> None:
        self._wake_loop = loop_waker()
        self._event = anyio.Event()
        self._is_set = False

    def set(self) -> None:
        """Wake the waiters, once and for all. From any thread; nothing happens when the loop is gone."""
        self._is_set = True  # here, not on the loop: there an interrupt may come between, and the waking be lost
        self._wake_loop(self._event.set)

    def is_set(self) -> bool:
        """Whether it has been set; the waiters may still have to hear of it."""
        return self._is_set

    async def wait(self) -> None:
        """Return once the event is set. Cancelling it changes nothing."""
        await self._event.wait()


class ThreadEvent:
    """The same for one waiter that is a thread.

    ``set()`` wakes it. It is a single call into C, as the wait is: an exception of a signal handler comes before it or
    after it, never in the middle, and leaves no lock taken.
    """

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.set: Callable[[], None] = partial(self._wakes.put, None)

    def wait_blocking(self) -> None:
        """Block the calling thread until the event is set; a signal handler's exception gets through."""
        self._wakes.get()
