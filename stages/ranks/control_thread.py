"""The thread in which a rank's end of the control star waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import ThreadCrew, wait_through

Result = TypeVar("Result")


class ControlThread:
    """Runs one call at a time, off the loop. It ends with the crew."""

    def __init__(self, crew: ThreadCrew) -> None:
        self._thread = crew.start("streamflow ranks")

    async def call(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns or raises. A cancelled call waits for it all the same."""
        outcome: Future[Result] = Future()
        done = LoopEvent()
        self._thread.submit(partial(_run, work, outcome, done))
        absorbed = await wait_through(done)
        if absorbed is not None:
            raise absorbed
        try:
            return outcome.result()
        finally:
            del outcome  # a failure's traceback has this frame: it would keep itself, and a connection's memory


def _run(work: Callable[[], Result], outcome: Future[Result], done: LoopEvent) -> None:
    try:
        outcome.set_result(work())
    except BaseException as failure:
        outcome.set_exception(failure)
    finally:
        del work, outcome  # as above
        done.set()
