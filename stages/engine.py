"""The engine: the window, the places, and the prefetch nursery that moves blocks between them.

Life of a block: the planner asks for it; its slot is taken from the block that was there (unbound) and the transfer
begins; once all copies are queued the block is bound to the slot and the passes of the walk are told; each runs it
after the copy's event and rings when it has; with the last ring the slot is free, and a refill waits on the device for
the events that came with the rings.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import anyio
import anyio.abc
import attrs
import torch

from streamflow.stages.binder import Binder
from streamflow.stages.decisions import Claim, Decision, Fetch, Refusal
from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.errors import DeviceStreamError, EngineBrokenError
from streamflow.stages.event_watch import EventWatch
from streamflow.stages.events import (
    BlockArrived,
    BlockLeft,
    BlockReady,
    BlockWanted,
    DeviceFailed,
    EngineFailed,
    FetchFailed,
    FetchIssued,
    FetchStarted,
    LinkTurn,
    PassEnded,
    PassMessage,
    PassRefused,
    PassStarted,
    RequestEnded,
    RequestStarted,
    SlotFree,
    SlowDeviceCall,
    WalkEnded,
    WalkJoined,
    WalkStarted,
    WaveNews,
)
from streamflow.stages.images import BlockImage
from streamflow.stages.links import LinkUser, join_link
from streamflow.stages.mailbox import Mailbox
from streamflow.stages.observers import Broadcast
from streamflow.stages.passes import Pass
from streamflow.stages.places import Place, WaitTimes
from streamflow.stages.signals import Doorbell
from streamflow.stages.slots import Window
from streamflow.stages.statistics import EngineStatistics
from streamflow.stages.threads import WorkerThread
from streamflow.stages.transfers.base import Fetching, Transfer
from streamflow.stages.until_stopped import UntilStopped
from streamflow.stages.walk_sources import StandingPass
from streamflow.stages.walks import WalkPlanner

#: A device call on the loop that takes longer is reported.
SLOW_CALL_S = 0.005
#: A slot that is busy until more events than these forgets those that have happened.
MAX_BUSY_EVENTS = 16


@attrs.frozen
class Resident:
    """A block that stays on the device; ``event`` happens when it is there."""

    buffer: torch.Tensor
    event: Event


class Engine:
    """Streams the blocks of one or several components through one window. Made by `open_engine`, which owns it;
    everything it needs is given to it. ``is_joint``: its fetches are made together with the engines of other ranks.

    The loop's side (everything private) and the compute threads' side (`begin_pass` and the passes) share nothing but
    mailboxes and the doorbell.
    """

    def __init__(
        self,
        *,
        device: Device,
        images: Mapping[int, BlockImage],
        window: Window,
        residents: Mapping[int, Resident],
        planner: WalkPlanner,
        transfer: Transfer,
        copy_stream: Stream,
        binder: Binder,
        places: Sequence[Place],
        is_joint: bool,
        open_watch: Callable[[], WorkerThread],
        nursery: anyio.abc.TaskGroup,
    ) -> None:
        self.places = tuple(places)
        #: Called on the loop once the engine has failed.
        self.on_failure: Callable[[], None] = lambda: None
        self.broadcast = Broadcast()
        self._device = device
        self._images = images
        self._window = window
        self._residents = residents
        #: The blocks that need not be fetched, each with the event by which it is there. The owner may add to them, on
        #: the loop, and take away again what no pass can be inside of.
        self.blocks_there: dict[int, Event] = {block: resident.event for block, resident in residents.items()}
        self._planner = planner
        self.transfer = transfer
        self._copy_stream = copy_stream
        self._binder = binder
        self._is_joint = is_joint
        self._watch = EventWatch(open_watch)
        self._nursery = nursery
        self._doorbell: Doorbell[PassMessage] = Doorbell()
        self._pass_ids = itertools.count(1)
        self._link: LinkUser
        self._fetches: deque[Fetch] = deque()
        self._mailboxes: dict[int, Mailbox] = {}
        self._current: dict[int, Pass] = {}
        self._failure: BaseException | None = None
        self._failure_lock = threading.Lock()
        self._until_stopped = UntilStopped()
        self._decide_at = math.inf
        self._num_passes = 0
        self._num_fetches = 0
        self._num_on_demand = 0
        self._streamed_bytes = 0
        self._num_slow_calls = 0

    # For compute threads

    def begin_request(self, place: Place) -> None:
        """A request occupies the place. In the request's own thread."""
        self._ring(RequestStarted(place.request_id, place.index))

    def begin_pass(self, place: Place, component: str, *, alone: bool = False) -> Pass:
        """A new pass of ``component`` in ``place``; one that was left open there (its thread was interrupted) is ended
        first. ``alone``: no other request may be in the component meanwhile.

        :raises StopForward: if the request is stopped.
        :raises EngineBrokenError: if the engine failed.
        :raises EngineClosedError: if the engine is closed.
        """
        place.mailbox.check()
        stale = self._current.get(place.index)
        if stale is not None:
            stale.end(completed=False)
        pass_id = next(self._pass_ids)
        self._mailboxes[pass_id] = place.mailbox
        begun = Pass(pass_id, component, alone, place, self._window, self.blocks_there, self._ring)
        self._current[place.index] = begun  # before anybody hears of it, so that it is ended whatever happens now
        begun.begin()
        return begun

    def settle(self, place: Place) -> None:
        """Wait, in the place's thread, until the device has done all that the place issued.

        :raises EngineBrokenError: if some of it failed; that breaks the engine.
        """
        try:
            place.settle()
        except DeviceStreamError as failure:
            self._ring(DeviceFailed(failure.cause))
            first = self._failure or failure.cause  # an earlier one may be why the device's work failed
            raise EngineBrokenError(first) from first
        if self._is_joint and self._failure is not None:  # what was queued ended, perhaps without having been gathered
            raise EngineBrokenError(self._failure) from self._failure

    def end_request(self, place: Place) -> None:
        """Leave the place clean for the next request: no pass open, nobody told to stop. In the place's own thread."""
        stale = self._current.get(place.index)
        try:
            if stale is not None:
                stale.end(completed=False)
        except Exception as failure:  # the device refuses even to record an event
            self._ring(DeviceFailed(failure))
        self._ring(RequestEnded(place.request_id, place.index, threading.get_ident()))
        place.mailbox.reset()

    def _ring(self, message: PassMessage) -> None:
        if isinstance(message, DeviceFailed):
            self._break(message.error)  # at once: whoever catches the error finds the engine broken
        self._doorbell.ring(message)

    # For the owner, on the loop

    @property
    def failure(self) -> BaseException | None:
        """What broke the engine; None while it is sound."""
        return self._failure

    @property
    def is_busy(self) -> bool:
        """Whether a pass runs, or waits for a walk."""
        return bool(self._mailboxes)

    def statistics(self) -> EngineStatistics:
        """The counters now."""
        waits = WaitTimes()
        for place in self.places:
            waits.add(place.waits)
        memory = self._device.memory()
        return EngineStatistics(
            num_walks=self._planner.num_walks,
            num_passes=self._num_passes,
            num_fetches=self._num_fetches,
            num_on_demand_fetches=self._num_on_demand,
            streamed_bytes=self._streamed_bytes,
            resident_bytes=sum(resident.buffer.numel() for resident in self._residents.values()),
            window_bytes=sum(slot.buffer.numel() for slot in self._window),
            scratch_bytes=self.transfer.scratch_bytes,
            staging_bytes=self.transfer.staging_bytes,
            device_in_use_bytes=memory.in_use,
            device_peak_bytes=memory.peak,
            num_mailbox_waits=waits.num_mailbox_waits,
            mailbox_wait_s=waits.mailbox_s,
            event_wait_s=waits.event_s,
            run_ahead_wait_s=waits.run_ahead_s,
            hooks_cpu_s=waits.hooks_cpu_s,
            num_blocks_run=waits.num_blocks,
            num_slow_device_calls=self._num_slow_calls,
            num_late_messages=self._doorbell.num_late,
            num_dropped_events=self.broadcast.num_dropped,
        )

    def standing_passes(self) -> list[StandingPass]:
        """As the planner says; none while a copy, or a gather with other ranks, is under way: all may wait for that."""
        for slot in self._window:
            if slot.block is not None and not (slot.busy_until and slot.busy_until[0].is_done()):
                return []
        return self._planner.standing_passes()

    async def serve(self) -> None:
        """The prefetch nursery's task: answer the doorbell until `stop_serving`, or until the engine fails.

        No scope around the engine cancels it: whoever is shielded from that scope may still be in a pass.
        """
        with self._until_stopped.scope(), join_link(self._own_or_shared_link(), self._ring_for_turn) as self._link:
            await self._serve()
        if self._failure is not None:
            self.broadcast.publish(EngineFailed(self._failure))
            self.on_failure()

    def _own_or_shared_link(self) -> Hashable:
        # Engines that wait in collectives for other ranks keep their turns meanwhile; the other engines of this process
        # might be what those ranks wait for, so they share no link.
        return id(self) if self._is_joint else self._device.link

    async def _serve(self) -> None:
        self._act_or_fail()
        while self._failure is None:
            messages = await self._doorbell.wait_until(self._decide_at)
            try:
                now = anyio.current_time()
                for message in messages:
                    self._note(message, now)
            except Exception as failure:
                self.fail(failure)
            self._act_or_fail()

    def fail(self, error: BaseException) -> None:
        """Mark the engine broken and end every wait with it; its task ends, too, gives the link up for others, and
        tells the observers. The first failure stays. From any thread.
        """
        self._break(error)
        self._doorbell.ring(EngineFailed(error))

    def _break(self, error: BaseException) -> None:
        with self._failure_lock:
            if self._failure is None:
                self._failure = error
            first = self._failure
        for place in self.places:
            place.mailbox.break_off(first)

    def wake(self) -> None:
        """Decide anew: the walk source knows something new. From any thread."""
        self._doorbell.ring(WaveNews())

    def stop_serving(self) -> None:
        """End the tasks, every wait of a compute thread, and drop what they may still ring. Idempotent."""
        for place in self.places:
            place.mailbox.close()
        self._until_stopped.stop()
        self._doorbell.close()
        self.broadcast.close()

    # On the loop: what the passes did

    def _note(self, message: PassMessage, now: float) -> None:
        match message:
            case PassStarted(pass_id, component, maker, request_id, alone, wave):
                self._num_passes += 1
                self._planner.join(
                    pass_id, component, maker=maker, alone=alone, now=now, request_id=request_id, wave=wave
                )
            case BlockWanted(pass_id, block, serial):
                refusal = self._planner.want(pass_id, block, serial)
                if refusal is not None:
                    self._refuse(refusal)
            case BlockArrived(slot, generation):
                self._planner.arrived(slot, generation)
            case BlockLeft(pass_id, block, passed_by, event):
                self._note_use(block, event)
                self._planner.left(pass_id, block, passed_by)
            case PassEnded():
                self._note_end(message, now)
            case RequestEnded(maker=maker):
                self._planner.gone(maker)
            case EngineFailed():
                return  # the failure that stays is told at the end
        self.broadcast.publish(message)

    def _note_use(self, block: int, event: Event) -> None:
        index = self._planner.slot_of(block)
        if index is not None:
            _add_user(self._window[index].busy_until, event)

    def _note_end(self, ended: PassEnded, now: float) -> None:
        for slot in self._window:
            if ended.pass_id in self._planner.claims_on(slot.index):
                _add_user(slot.busy_until, ended.event)
        self._planner.end(ended.pass_id, completed=ended.completed, now=now)
        self._mailboxes.pop(ended.pass_id, None)

    # On the loop: what follows from it

    def _act_or_fail(self) -> None:
        if self._failure is None:
            try:
                self._act()
            except Exception as failure:
                self.fail(failure)

    def _act(self) -> None:
        while True:
            decision = self._planner.decide(anyio.current_time())
            self._decide_at = math.inf if decision.again_at is None else decision.again_at
            self._publish_walks(decision)
            for refusal in decision.refused:
                self._refuse(refusal)
            for claim in decision.claims:
                self._tell(claim)
            for fetch in decision.fetches:
                self._fetches.append(fetch)
                self._link.ask(self._images[fetch.block].nbytes)
            if not self._take_turns():
                return

    def _take_turns(self) -> bool:
        """Begin the fetches that may use the link now; returns whether the copies of one are all queued already."""
        issued_at_once = False
        while self._link.turns:
            is_counted = self._link.turns.popleft()
            issued_at_once |= self._start_fetch(self._fetches.popleft(), is_counted)
        return issued_at_once

    def _ring_for_turn(self) -> None:
        self._doorbell.ring(LinkTurn())

    def _publish_walks(self, decision: Decision) -> None:
        walk = decision.started
        if decision.ended is not None:
            self.broadcast.publish(WalkEnded(decision.ended))
        if walk is not None:
            self.broadcast.publish(WalkStarted(walk.walk_id, walk.component, walk.pass_ids))
        if decision.joined:
            self.broadcast.publish(WalkJoined(self._planner.num_walks, decision.joined))

    def _tell(self, claim: Claim) -> None:
        event = self._window[claim.slot].busy_until[0]
        mailbox = self._mailboxes.get(claim.pass_id)
        if mailbox is not None:
            mailbox.post(
                BlockReady(claim.pass_id, claim.block, claim.slot, claim.generation, claim.serial, claim.rank, event)
            )

    def _refuse(self, refusal: Refusal) -> None:
        self.broadcast.publish(PassRefused(refusal.pass_id, refusal.error))
        mailbox = self._mailboxes.get(refusal.pass_id)
        if mailbox is not None:
            mailbox.refuse(refusal.pass_id, refusal.error)

    def _start_fetch(self, fetch: Fetch, is_counted: bool) -> bool:
        """Begin a fetch; returns whether its copies are all queued already. ``is_counted``: others wait for its end."""
        image = self._images[fetch.block]
        if fetch.drops is not None:
            self._binder.unbind(fetch.drops)
            self.broadcast.publish(SlotFree(fetch.slot, fetch.drops))
        self._num_fetches += 1
        self._num_on_demand += fetch.on_demand
        self._streamed_bytes += image.nbytes
        self.broadcast.publish(FetchStarted(fetch.block, fetch.slot, fetch.generation, image.nbytes, fetch.on_demand))
        with self._timed(f"fetch of block {fetch.block}"):
            after = self._window.refill(fetch.slot, fetch.block, fetch.generation, self._copy_stream)
            fetching = self.transfer.fetch(image, self._window[fetch.slot].buffer, after)
        if fetching.event is None:
            name = f"fetch of block {fetch.block}"
            self._nursery.start_soon(self._finish_fetch, fetch, is_counted, fetching, name=name)
            return False
        self._fetched(fetch, is_counted, fetching.event)
        return True

    async def _finish_fetch(self, fetch: Fetch, is_counted: bool, fetching: Fetching) -> None:
        with self._until_stopped.scope():
            try:
                event = await fetching.issued()
                if self._failure is None:
                    self._fetched(fetch, is_counted, event)
                else:  # nobody uses it, but the slot's memory has to last until then
                    self._window[fetch.slot].busy_until.append(event)
            except Exception as failure:
                self.broadcast.publish(FetchFailed(fetch.block, failure))
                self.fail(failure)
            self._act_or_fail()

    def _fetched(self, fetch: Fetch, is_counted: bool, event: Event) -> None:
        if is_counted:
            self._watch.when_happened(event, self._link.done)
        slot = self._window[fetch.slot]
        # first in the list: what the passes wait for, and what a refill waits for even if no pass ever ran the block
        slot.busy_until.insert(0, event)
        with self._timed(f"binding of block {fetch.block}"):
            self._binder.bind(fetch.block, fetch.slot, slot.buffer)
        if self._planner.fetched(fetch.slot, fetch.generation):
            arrived = BlockArrived(fetch.slot, fetch.generation)
            self._watch.when_happened(event, lambda: self._ring(arrived))
        self.broadcast.publish(FetchIssued(fetch.block, fetch.slot, fetch.generation, event))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if seconds > SLOW_CALL_S:
            self._num_slow_calls += 1
            self.broadcast.publish(SlowDeviceCall(what, seconds))


def _add_user(busy_until: list[Event], event: Event) -> None:
    """One more event to wait for; the first, the copy's, stays the first."""
    if len(busy_until) > MAX_BUSY_EVENTS:  # a block that is never evicted gathers an event with each pass
        busy_until[1:] = [other for other in busy_until[1:] if not other.is_done()]
    busy_until.append(event)
