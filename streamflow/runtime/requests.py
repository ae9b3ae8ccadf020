"""One request: a callable run in a place's thread, awaited from any loop, stopped when its caller is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from streamflow.runtime.admission import Admission, Turn
from streamflow.stages.callers import CallerContext
from streamflow.stages.errors import EngineClosedError, StopForward
from streamflow.stages.places import Place
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import more_urgent, wait_through

Result = TypeVar("Result")


class Request(Generic[Result]):
    """``work`` in a place, under ``entered`` (which puts its thread to work for the place).

    Made and awaited by one task, on any loop; the thread belongs to the offload's own crew.
    """

    def __init__(self, work: Callable[[], Result], entered: Callable[[Place], AbstractContextManager[None]]) -> None:
        self._work = work
        self._entered = entered
        self._caller = CallerContext.capture()
        self._finished = LoopEvent()
        self._result: Future[Result] = Future()

    async def wait(self, admission: Admission, turn: Turn) -> Result:
        """What ``work`` returns or raises, once the device has done all of it; ``turn`` is what it entered with.

        A cancelled call withdraws while it waits for a place. Later it stops the forward at its next block boundary,
        waits for the thread whatever further cancels come, and is cancelled then.

        :raises EngineClosedError: if the offload is closed meanwhile.
        """
        try:
            await self._finished.wait()
        except BaseException as interruption:
            admission.leave(turn)
            absorbed = await wait_through(self._finished)
            self._result = Future()  # nobody wants it any more; see `_take_result`
            raise more_urgent(interruption, absorbed) from None
        try:
            return self._take_result()
        except StopForward:
            raise EngineClosedError from None

    def _take_result(self) -> Result:
        """The result, once. An exception's traceback leads to frames that lead here: kept here, too, it would keep what
        the work had made until the collector comes by.
        """
        result, self._result = self._result, Future()
        try:
            return result.result()
        finally:
            del result

    def serve(self, place: Place) -> None:
        try:
            result = self._caller.run(lambda: self._run_in(place))
        except BaseException as failure:
            self._result.set_exception(failure)
        else:
            self._result.set_result(result)

    def _run_in(self, place: Place) -> Result:
        with self._entered(place):
            return self._work()

    def refuse(self) -> None:
        self._result.set_exception(EngineClosedError())

    def over(self) -> None:
        self._finished.set()
