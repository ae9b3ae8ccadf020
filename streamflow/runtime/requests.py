"""One request: a callable run in a place's thread, awaited from any loop, stopped when its caller is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from streamflow.stages.callers import CallerContext
from streamflow.stages.errors import EngineClosedError, StopForward
from streamflow.stages.places import Place
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import wait_through

Result = TypeVar("Result")


class Request(Generic[Result]):
    """``work`` in ``place``, under ``entered`` (which puts the thread to work for the place).

    Made and awaited by one task, on any loop; the thread belongs to the offload's own crew.
    """

    def __init__(
        self, place: Place, work: Callable[[], Result], entered: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._place = place
        self._work = work
        self._entered = entered
        self._caller = CallerContext.capture()
        self._finished = LoopEvent()
        self._result: Future[Result] = Future()

    async def run(self) -> Result:
        """What ``work`` returns or raises, once the device has done all of it.

        A cancelled call stops the forward at its next block boundary, waits for the thread whatever further cancels
        come, and is cancelled then.

        :raises EngineClosedError: if the offload is closed meanwhile.
        """
        self._place.thread.submit(self._run_in_thread)
        try:
            await self._finished.wait()
        except BaseException:
            self._place.mailbox.stop()
            await wait_through(self._finished)
            raise
        try:
            return self._result.result()
        except StopForward:
            raise EngineClosedError from None

    def _run_in_thread(self) -> None:
        try:
            result = self._caller.run(self._run_entered)
        except BaseException as failure:
            self._result.set_exception(failure)
        else:
            self._result.set_result(result)
        finally:
            self._place.mailbox.reset()
            self._finished.set()

    def _run_entered(self) -> Result:
        with self._entered():
            try:
                return self._work()
            finally:
                self._place.settle()
