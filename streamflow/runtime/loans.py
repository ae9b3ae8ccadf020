"""A place lent to a thread that is no request: one that calls the model directly."""

from __future__ import annotations

from streamflow.runtime.admission import Admission, Turn
from streamflow.stages.errors import EngineClosedError
from streamflow.stages.places import Place
from streamflow.stages.signals import ThreadEvent


class Loan:
    """A place for the thread that made this, from `borrow` until `give_back`; its own thread waits meanwhile.

    The borrower may be the main thread, where a signal handler's exception can come between any two instructions. So
    `give_back` belongs into a ``finally`` whose ``try`` begins before `borrow`, as its first call: it is a single call
    into C, and all that there is to clean up happens in the place's thread. `wait_over` may follow.
    """

    def __init__(self) -> None:
        self._granted = ThreadEvent()
        self._returned = ThreadEvent()
        self._over = ThreadEvent()
        self._turn: Turn | None = None
        self._place: Place | None = None
        self.give_back = self._returned.set

    def borrow(self, admission: Admission) -> Place:
        """Block the calling thread until it has a place.

        :raises EngineClosedError: if the offload is closed, or is closed meanwhile.
        :raises OverloadedError: if as many wait as may.
        """
        self._turn = turn = admission.enter(self)
        try:
            self._granted.wait_blocking()
        except BaseException:
            admission.leave(turn)
            raise
        if self._place is None:
            raise EngineClosedError
        return self._place

    def serve(self, place: Place) -> None:
        self._place = place
        self._granted.set()
        self._returned.wait_blocking()

    def refuse(self) -> None:
        self._granted.set()

    def over(self) -> None:
        self._over.set()

    def wait_over(self) -> None:
        """Block the calling thread, which has called `give_back`, until it has no place and waits for none."""
        if self._turn is not None:
            self._over.wait_blocking()
