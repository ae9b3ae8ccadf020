"""The mailbox of a place: how its thread learns that a block may run, and that it must stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from streamflow.stages.devices.base import Event
from streamflow.stages.errors import EngineBrokenError, EngineClosedError, StopForward
from streamflow.stages.events import BlockReady

#: What a question of a compute thread is answered by: events to wait for, or an exception to raise.
Answer = tuple[Event, ...] | BaseException


class Mailbox:
    """Block-ready messages from the loop to one compute thread.

    The thread calls `begin`, `take`, `ask`, `wait`, `check`, `draw_ticket`, `wait_for_answer` and `wait_until`; the
    loop calls `post`, `refuse` and `answer`; anyone calls `ring`, `stop`, `break_off` and `close`. Every wait ends by
    ready, refused, answered, rung, stop, broken or closed. It holds at most one message for each slot of the window,
    and one answer.
    """

    def __init__(self) -> None:
        # No condition variable: its wait, torn by a signal handler's exception, could leave the lock in a wrong state.
        self._lock = threading.Lock()
        self._bell = threading.Lock()  # free: something came since the thread last looked
        self._bell.acquire()
        self._ready: dict[int, BlockReady] = {}
        self._pass_id: int | None = None
        self._serial = 0
        self._ticket = 0
        self._answer: Answer | None = None
        self._refusal: Exception | None = None
        self._stopped = False
        self._broken: BaseException | None = None
        self._closed = False

    def begin(self, pass_id: int) -> None:
        """Forget the last pass; from now on only messages for ``pass_id`` are kept."""
        with self._lock:
            self._ready.clear()
            self._pass_id, self._serial, self._refusal = pass_id, 0, None

    def post(self, ready: BlockReady) -> None:
        """Deliver a message; one for another pass, or older than the thread's last `ask`, is dropped."""
        with self._lock:
            if ready.pass_id == self._pass_id and ready.serial == self._serial:
                self._ready[ready.block] = ready
                self._ring()

    def refuse(self, pass_id: int, error: Exception) -> None:
        """End the waits of a pass with ``error``: it gets no block any more. One for another pass is dropped."""
        with self._lock:
            if pass_id == self._pass_id:
                self._refusal = error
                self._ring()

    def take(self, block: int) -> tuple[BlockReady, tuple[int, ...]] | None:
        """The message for ``block`` and the blocks passed by for it, whose messages are given up; None if not here."""
        with self._lock:
            return self._take(block)

    def _take(self, block: int) -> tuple[BlockReady, tuple[int, ...]] | None:
        ready = self._ready.pop(block, None)
        if ready is None:
            return None
        passed_by = tuple(b for b, other in self._ready.items() if other.rank < ready.rank)
        for passed in passed_by:
            del self._ready[passed]
        return ready, passed_by

    def ask(self) -> int:
        """Give up all messages, and get the serial number that the next ones must carry."""
        with self._lock:
            self._ready.clear()
            self._serial += 1
            return self._serial

    def wait(self, block: int) -> tuple[BlockReady, tuple[int, ...]]:
        """Block the thread until ``block`` may run.

        :raises StopForward: if the request is stopped.
        :raises EngineBrokenError: if the engine failed.
        :raises EngineClosedError: if the engine is closed.
        :raises Exception: what the pass is refused with.
        """
        while True:
            with self._lock:
                self._check()
                taken = self._take(block)
                refusal = self._refusal
            if taken is not None:
                return taken
            if refusal is not None:
                raise refusal
            self._bell.acquire()

    def draw_ticket(self) -> int:
        """A number for one question to the loop, whose `answer` must carry it; earlier ones are void."""
        with self._lock:
            self._answer = None
            self._ticket += 1
            return self._ticket

    def answer(self, ticket: int, answer: Answer) -> None:
        """Deliver the answer to a question; one to an earlier question is dropped."""
        with self._lock:
            if ticket == self._ticket:
                self._answer = answer
                self._ring()

    def wait_for_answer(self) -> tuple[Event, ...]:
        """Block the thread until the question of the last ticket is answered; returns the events it is answered by.

        :raises StopForward: if the request is stopped.
        :raises EngineBrokenError: if the engine failed.
        :raises BaseException: if it is answered by this exception.
        """
        while True:
            with self._lock:
                self._check()
                answer, self._answer = self._answer, None
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                return answer
            self._bell.acquire()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Block the thread until ``is_so()``, which is asked now and after each `ring`.

        :raises StopForward: if the request is stopped.
        :raises EngineBrokenError: if the engine failed.
        :raises EngineClosedError: if the engine is closed.
        """
        while not is_so():
            self.check()
            self._bell.acquire()

    def ring(self) -> None:
        """Let the thread, if it waits in `wait_until`, ask again."""
        with self._lock:
            self._ring()

    def check(self) -> None:
        """Return if the thread may go on.

        :raises StopForward: if the request is stopped.
        :raises EngineBrokenError: if the engine failed.
        :raises EngineClosedError: if the engine is closed.
        """
        if self._stopped or self._closed or self._broken is not None:
            self._check()

    def _check(self) -> None:
        if self._broken is not None:
            raise EngineBrokenError(self._broken) from self._broken
        if self._stopped:
            raise StopForward
        if self._closed:
            raise EngineClosedError

    def stop(self) -> None:
        """End the running request at its next block boundary, or in its wait."""
        with self._lock:
            self._stopped = True
            self._ring()

    def break_off(self, error: BaseException) -> None:
        """End this and every later request with ``error``."""
        with self._lock:
            self._broken = error
            self._ring()

    def close(self) -> None:
        """End this and every later request: nobody is there any more to answer."""
        with self._lock:
            self._closed = True
            self._ring()

    def _ring(self) -> None:
        # under the lock, so that no two ring at once
        if self._bell.locked():
            self._bell.release()

    def reset(self) -> None:
        """Forget a `stop`: the next request begins. A failure stays, and so does a `close`."""
        with self._lock:
            self._ready.clear()
            self._pass_id = self._refusal = None
            self._stopped = False
