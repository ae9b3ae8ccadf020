"""The order of gathers: they are queued as they were announced, each once its slice is on its way.

All ranks announce in one order. Their copies end in any: a gather that is ready early waits for those before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context

import attrs

from streamflow.stages.devices.base import Event, Stream


@attrs.define(eq=False)
class Step:
    """Something for the communication stream, once ``num_missing`` copies have been queued.

    ``act`` queues it. ``drop`` is called instead if that fails, or a step before it failed (None: nobody cares).
    ``after``: what it waits for; whoever queues the last copy puts its event there. It is queued in the context in
    which it was made, the fetch's, whatever thread does it.
    """

    act: Callable[[], object]
    num_missing: int
    after: Sequence[Event]
    drop: Callable[[], object] | None = None
    context: Context = attrs.field(factory=copy_context)


class GatherOrder:
    """Steps on their way to ``stream``. After a failure, of a step or told of by `break_off`, none is queued any more:
    a gather that was left out would let the next one bring together what does not belong together.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._steps: deque[Step] = deque()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """Why nothing is queued any more; None while all is well."""
        return self._failure

    def announce(self, steps: Iterable[Step]) -> None:
        """Let ``steps`` come after all that were announced before. On the loop only; never blocks."""
        self._steps.extend(steps)

    def come(self, step: Step, copied: Callable[[], Event]) -> None:
        """A copy that ``step`` waits for has been queued; if it was the last, ``copied`` gives the event to wait for.

        From any thread.
        """
        with self._lock:
            step.num_missing -= 1
            if not step.num_missing:
                step.after = (copied(),)
        self.advance()

    def break_off(self, failure: BaseException) -> None:
        """Queue no step any more: the next one never comes. The first failure stays. From any thread."""
        with self._lock:
            if self._failure is None:
                self._failure = failure
        self.advance()

    def advance(self) -> None:
        """Queue the steps that are ready, in order; after a failure, drop all. From any thread."""
        with self._lock:
            while self._steps and (self._failure is not None or not self._steps[0].num_missing):
                step = self._steps.popleft()
                if self._failure is None:
                    self._queue(step)
                if self._failure is not None and step.drop is not None:
                    step.drop()

    def _queue(self, step: Step) -> None:
        try:
            for event in step.after:
                self.stream.wait(event)
            step.context.run(step.act)
        except BaseException as failure:
            self._failure = failure
