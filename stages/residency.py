"""Residency: components come to the device for those who ask, and go when nobody needs them.

Compute threads ask and wait; the loop decides (`ResidencyLedger`), moves what is to move, and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import anyio
import anyio.abc

from streamflow.stages.devices.base import Event
from streamflow.stages.errors import DeviceMemoryError, DeviceStreamError, EngineBrokenError, NestedComponentError
from streamflow.stages.events import ComponentArrived, ComponentFailed, ComponentLeft
from streamflow.stages.ledger import Lease, Presence, ResidencyLedger
from streamflow.stages.mailbox import Answer
from streamflow.stages.movables import Movable
from streamflow.stages.observers import Broadcast
from streamflow.stages.places import Place
from streamflow.stages.residency_messages import Asked, CallFailed, Message, Released, Withdrawn
from streamflow.stages.retention import Reason
from streamflow.stages.retention_observer import RetentionObserver
from streamflow.stages.signals import Doorbell
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.transfers.base import Transfer


class Residency:
    """The components that move. Made by `open_residency`, which owns it."""

    def __init__(
        self,
        movables: Iterable[Movable],
        *,
        budget_bytes: int | None,
        transfer: Transfer,
        crew: ThreadCrew,
        nursery: anyio.abc.TaskGroup,
        broadcast: Broadcast,
        retention: RetentionObserver,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._movables = {movable.name: movable for movable in movables}
        self._ledger = ResidencyLedger({m.name: m.nbytes for m in self._movables.values()}, budget_bytes)
        self.budget_bytes = budget_bytes
        self._transfer = transfer
        self._crew = crew
        self._nursery = nursery
        self._broadcast = broadcast
        self._retention = retention
        self._fail = fail
        self._doorbell: Doorbell[Message] = Doorbell()
        self._questions: dict[Lease, Asked] = {}
        self._peak_bytes = 0
        self._serving = anyio.CancelScope(shield=True)

    # For compute threads

    def ask(self, place: Place, component: str, *, keep: bool) -> None:
        """Return once the component is on the device for work in ``place``, and stays until `release`.

        ``keep``: it may stay longer, until somebody asks for another. The place's stream goes on when it is there.

        :raises StopForward: if the request is stopped.
        :raises EngineBrokenError: if the engine failed, or the copy did.
        :raises DeviceMemoryError: if it does not fit on the device, also with the allocator's cache released.
        :raises SourceReadError: if its source no longer holds the bytes.
        :raises NestedComponentError: if it is asked for inside another component, and there is no room for both.
        """
        try:
            self._doorbell.ring(Asked(place, component, keep, place.mailbox.draw_ticket()))
            for event in place.mailbox.wait_for_answer():
                place.stream.wait(event)
        except DeviceStreamError as failure:
            self._fail(failure.cause)
            place.mailbox.check()  # an earlier one may be why the device's work failed
            raise EngineBrokenError(failure.cause) from failure.cause
        except BaseException:
            self.release(place, component)
            raise

    def release(self, place: Place, component: str) -> None:
        """The place's work with the component is all queued. Idempotent."""
        self._doorbell.ring(Released(place, component, place.stream.record()))

    def withdraw(self, place: Place) -> None:
        """The place's request is over, and holds nothing any more. Idempotent."""
        events: tuple[Event, ...] = ()
        try:
            events = (place.stream.record(),)
        except Exception as failure:  # the device refuses even to record an event
            self._fail(failure)
        self._doorbell.ring(Withdrawn(place, events))

    def note_failure(self, component: str, error: BaseException) -> None:
        """A call of the component failed: what it had allocated is worth nothing to the next one."""
        self._doorbell.ring(CallFailed(component, error))

    # For the owner, on the loop

    def presence(self, component: str) -> Presence:
        """Where the component is."""
        return self._ledger.presence(component)

    @property
    def staged_bytes(self) -> int:
        """Device bytes of the components that are there now, coming or going."""
        return self._ledger.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that there was."""
        return self._peak_bytes

    @property
    def num_waiting(self) -> int:
        """Compute threads that wait for a component."""
        return self._ledger.num_waiting

    async def serve(self) -> None:
        """Answer until `stop`."""
        with self._serving:
            while True:
                messages = await self._doorbell.wait()
                try:
                    for message in messages:
                        self._note(message)
                except Exception as failure:
                    self._fail(failure)
                self._act_or_fail()

    def stop(self) -> None:
        """Answer nobody any more; what moves comes to its end. Idempotent."""
        self._serving.cancel()
        self._doorbell.close()

    def unbind_all(self) -> None:
        """Point every component's tensors away from the device."""
        with ExitStack() as all_of_them:
            for movable in self._movables.values():
                all_of_them.callback(movable.unbind)

    def free_all(self) -> None:
        """Give all device memory back, once the device is done with it. Blocks."""
        for movable in self._movables.values():
            movable.free()

    # On the loop

    def _note(self, message: Message) -> None:
        match message:
            case Asked(place, component, keep):
                self._ledger.ask(place.index, component, keep=keep)
                self._questions[Lease(place.index, component)] = message
            case Released(place, component, event):
                self._movables[component].note_use(event)
                self._questions.pop(Lease(place.index, component), None)
                self._ledger.release(place.index, component)
            case Withdrawn(place, events):
                for name in self._ledger.held_by(place.index):
                    for event in events:
                        self._movables[name].note_use(event)
                self._ledger.withdraw(place.index)
            case CallFailed(component, error):
                self._broadcast.publish(ComponentFailed(component, error, self.staged_bytes))

    def _act_or_fail(self) -> None:
        try:
            self._act()
        except Exception as failure:
            self._fail(failure)

    def _act(self) -> None:
        moves = self._ledger.decide()
        self._peak_bytes = max(self._peak_bytes, self._ledger.used_bytes)
        for name in moves.leave:
            self._nursery.start_soon(self._take_away, name, name=f"leaving of {name}")
        for name in moves.arrive:
            self._nursery.start_soon(self._bring, name, name=f"arrival of {name}")
        for lease in moves.granted:
            self._answer(lease, self._movables[lease.component].ready)
        for lease in moves.refused:
            nbytes = self._movables[lease.component].nbytes
            error = NestedComponentError(lease.component, nbytes, self.staged_bytes, self.budget_bytes)
            self._answer(lease, error)

    def _answer(self, lease: Lease, answer: Answer) -> None:
        question = self._questions.pop(lease, None)
        if question is not None:
            question.place.mailbox.answer(question.ticket, answer)

    async def _bring(self, name: str) -> None:
        movable = self._movables[name]
        with anyio.CancelScope(shield=True):
            try:
                await self._allocate(movable)
                await movable.fetch(self._transfer)
                movable.bind()
            except Exception as failure:
                movable.unbind()
                await self._crew.call_through(movable.free)
                self._could_not_come(name, failure)
            else:
                self._ledger.arrived(name)
                self._broadcast.publish(ComponentArrived(name, movable.nbytes, self.staged_bytes))
            self._act_or_fail()

    async def _allocate(self, movable: Movable) -> None:
        try:
            await self._crew.call_through(movable.allocate)
        except DeviceMemoryError as first:
            await self._retention.release_now(Reason.OUT_OF_MEMORY, self.staged_bytes)
            try:
                await self._crew.call_through(movable.allocate)
            except DeviceMemoryError:
                raise first from None

    def _could_not_come(self, name: str, failure: Exception) -> None:
        for holder in self._ledger.failed(name):
            self._answer(Lease(holder, name), failure)
        self._broadcast.publish(ComponentFailed(name, failure, self.staged_bytes))

    async def _take_away(self, name: str) -> None:
        movable = self._movables[name]
        with anyio.CancelScope(shield=True):
            try:
                movable.unbind()
            except Exception as failure:  # somebody changed weights that were on the device: the change is lost
                self._fail(failure)
            await self._crew.call_through(movable.free)
            self._ledger.left(name)
            self._broadcast.publish(ComponentLeft(name, movable.nbytes, self.staged_bytes))
            self._act_or_fail()
