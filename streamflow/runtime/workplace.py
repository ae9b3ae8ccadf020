"""The workplace: where calls of components run, and how each gets the component to be there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from streamflow.errors import ForkedOffloadError, LoopThreadError
from streamflow.runtime.admission import Admission
from streamflow.runtime.loans import Loan
from streamflow.runtime.state_gate import ComponentGate
from streamflow.runtime.thread_state import ThreadState
from streamflow.spans import pass_span
from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.engine import Engine
from streamflow.stages.errors import EngineClosedError, StopForward
from streamflow.stages.places import Place
from streamflow.stages.residency import Residency

Result = TypeVar("Result")


class Workplace:
    """Runs calls in the place of the thread's request, or in one that another thread borrows for the call.

    A component that moves is held (``residency``; None: nothing moves) from a request's first call of it until the
    request calls another one, or ends; for a borrowing thread, until somebody calls another one. Of a component that
    keeps state between calls (``gates``, by component) one request at a time has the use. ``together``: the components
    that a request in the place walks over with those of other ranks, once it has begun to (None: there are none).
    """

    def __init__(
        self,
        engine: Engine,
        device: Device,
        admission: Admission,
        residency: Residency | None,
        gates: Mapping[str, ComponentGate],
        together: Callable[[Place], Collection[str]] | None = None,
    ) -> None:
        self.state = ThreadState()
        self._engine = engine
        self._device = device
        self.admission = admission
        self._residency = residency
        self._gates = gates
        self._together = together
        self._opened_by = os.getpid()
        self._loop_thread = threading.get_ident()
        self._last_callers: dict[int, Stream] = {}

    @property
    def serialised_by(self) -> tuple[str, ...]:
        """The modules that keep state between calls, each with how that is known."""
        return tuple(str(module) for component in self._gates.values() for module in component.gate.stateful)

    @contextmanager
    def request_in(self, place: Place, caller: Stream) -> Iterator[None]:
        """The calling thread works for a request in ``place``, on its stream, after what ``caller`` had queued.

        On leaving, the device has done all of it.

        :raises EngineBrokenError: if some of it failed there.
        """
        self.state.place = place
        try:
            self._engine.begin_request(place)
            self._follow(caller, place)
            with place.stream.activate():
                try:
                    yield
                finally:
                    self._engine.settle(place)
        finally:
            self._forget()

    def _forget(self) -> None:
        """The calling thread works in no place any more."""
        for component in self._gates.values():
            component.gate.leave()
        self.state.place = None
        self.state.inside = self.state.leases = ()

    def _follow(self, caller: Stream, place: Place) -> None:
        """Let the place's work start after ``caller``'s, and after the last caller's: that may still read results."""
        previous = self._last_callers.get(place.index)
        self._last_callers[place.index] = caller
        for stream in (previous, caller):
            if stream is not None:
                place.stream.wait(stream.record())

    def run(self, component: str, work: Callable[[Place, bool], Result]) -> Result:
        """What ``work(place, alone)`` returns, called while ``component`` is held for the calling thread. ``alone``: no
        other request may be in it meanwhile.

        :raises ForkedOffloadError: if the offload was opened before this process was forked.
        :raises LoopThreadError: if the calling thread is that of the offload's loop.
        :raises EngineClosedError: if the offload is closed, or is closed meanwhile.

        What `Residency.ask` raises, too.
        """
        if os.getpid() != self._opened_by:
            raise ForkedOffloadError(self._opened_by, os.getpid())
        place = self.state.place
        if place is not None:
            with pass_span(component, place.request_id):
                return self._stay(place, component, work, keep=False)
        if threading.get_ident() == self._loop_thread:
            raise LoopThreadError(component)
        with pass_span(component, None):
            return self._run_from_outside(component, work)

    def _run_from_outside(self, component: str, work: Callable[[Place, bool], Result]) -> Result:
        """A call of a thread that is no request: it occupies a place, and its own stream goes on after the call."""
        loan = Loan()
        try:
            place = loan.borrow(self.admission)
            caller = self._device.caller_stream()
            self.state.place = place
            try:
                self._engine.begin_request(place)
                self._follow(caller, place)
                with place.stream.activate():
                    return self._stay(place, component, work, keep=True)
            except StopForward:  # only closing stops a thread that is no request
                raise EngineClosedError from None
            finally:
                self.state.place = None
                caller.wait(place.stream.record())
        finally:
            loan.give_back()  # the first call: see `Loan`
            try:
                self._forget()
            except KeyboardInterrupt:
                self._forget()  # what it had not come to yet
                raise
            finally:
                loan.wait_over()

    def _stay(self, place: Place, component: str, work: Callable[[Place, bool], Result], *, keep: bool) -> Result:
        # The state is set and reset by plain assignments: no exception of a signal handler leaves the thread inside.
        outer, held = self.state.inside, self.state.leases
        try:
            self.state.inside = (*outer, component)
            if not outer and component not in held:  # the next stage begins: what the last one needed may go first
                for earlier in held:
                    self._let_go(place, earlier)
            # first the gate, then the device: who waits for the one holds nothing of the other
            self._enter_together(place, component)
            with self._gates[component].gate.forward(place.mailbox) as alone:
                if component not in held:
                    self._hold(place, component, keep)
                return work(place, alone)
        except Exception as failure:
            if self._residency is not None and not outer:
                self._residency.note_failure(component, failure)
            raise
        finally:
            self.state.inside = outer
            if outer and component not in held:
                self._let_go(place, component)

    def _enter_together(self, place: Place, component: str) -> None:
        """Pass all gates of a wave before it: those who are in it wait for each other, so none may wait for a gate."""
        together = () if self._together is None else self._together(place)
        if component in together:
            for name in together:
                if name in self._gates and self._gates[name].lasts:
                    self._gates[name].gate.enter(place.mailbox)

    def _hold(self, place: Place, component: str, keep: bool) -> None:
        if self._residency is not None:
            self._residency.ask(place, component, keep=keep)
            self.state.leases = (*self.state.leases, component)

    def _let_go(self, place: Place, component: str) -> None:
        if self._residency is not None:
            self.state.leases = tuple(held for held in self.state.leases if held != component)
            self._residency.release(place, component)
        if not self._gates[component].lasts:
            self._gates[component].gate.leave()

    def clean(self, place: Place) -> None:
        """Leave the place clean for the next request: nothing held, no pass open. In the place's own thread."""
        if self._residency is not None:
            self._residency.withdraw(place)
        self._engine.end_request(place)
