"""A pass, as its compute thread sees it: before each block it waits to be told, after each block it says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from streamflow.stages.devices.base import Event
from streamflow.stages.errors import DeviceStreamError, EngineBrokenError, NestedBlockError
from streamflow.stages.events import (
    BlockLeft,
    BlockReady,
    BlockWanted,
    DeviceFailed,
    PassEnded,
    PassMessage,
    PassStarted,
)
from streamflow.stages.places import Place
from streamflow.stages.slots import Window


class Pass:
    """One forward call of a component, in one place. All methods are for its compute thread.

    Use: `begin`; `enter` and `leave` around every block, then `keep_pace`; `end`. `end` must be reached on any exit; it
    repairs what a failed block left behind. Interrupted anywhere, by a signal handler's exception, it can be called
    again, from the place's own thread too.
    """

    def __init__(
        self,
        pass_id: int,
        component: str,
        alone: bool,
        place: Place,
        window: Window,
        residents: Mapping[int, Event],
        ring: Callable[[PassMessage], None],
    ) -> None:
        self.pass_id = pass_id
        self._component = component
        self._alone = alone
        self._place = place
        self._window = window
        self._residents = residents
        self._ring = ring
        self._inside: int | None = None
        self._passed_by: tuple[int, ...] = ()
        self._ended = False

    def begin(self) -> None:
        """Wait for a walk from now on."""
        self._place.mailbox.begin(self.pass_id)
        if self._place.watch is not None:
            self._place.watch.pass_begun(self.pass_id)
        maker = threading.get_ident()
        place = self._place
        wave = None if place.wave is None else place.wave.of_pass(self._component)
        self._ring(PassStarted(self.pass_id, self._component, maker, place.request_id, self._alone, wave))

    def enter(self, block: int) -> None:
        """Return when the thread may issue the block's work.

        :raises StopForward: if the request is stopped.
        :raises EngineBrokenError: if the engine failed, or the block's copy did.
        :raises NestedBlockError: if the pass is inside a block.
        :raises OutOfTurnError: if the ranks would have to fetch the block in another order; see `WaveWalks`, which
            refuses a pass for other reasons, too.
        """
        self._place.mailbox.check()
        if self._inside is not None:
            raise NestedBlockError(block, self._inside)
        self._wait_for(self._event_of(block), block)
        self._inside = block
        self._place.stream.begin_block()
        if self._place.watch is not None:
            self._place.watch.entered(self.pass_id, block)

    def _event_of(self, block: int) -> Event:
        resident = self._residents.get(block)
        if resident is not None:
            return resident
        ready = self._ready(block)
        self._window[ready.slot].check(block, ready.generation)
        return ready.event

    def _ready(self, block: int) -> BlockReady:
        mailbox = self._place.mailbox
        taken = mailbox.take(block)
        if taken is None:
            started = time.perf_counter()
            self._ring(BlockWanted(self.pass_id, block, mailbox.ask()))
            taken = mailbox.wait(block)
            self._place.waits.mailbox_s += time.perf_counter() - started
            self._place.waits.num_mailbox_waits += 1
            if self._place.watch is not None:
                self._place.watch.waited("mailbox", block, started)
        ready, self._passed_by = taken
        return ready

    def _wait_for(self, event: Event, block: int) -> None:
        started = time.perf_counter()
        try:
            self._place.stream.wait(event)
        except DeviceStreamError as failure:
            self._break_off(failure)
        self._place.waits.event_s += time.perf_counter() - started
        if self._place.watch is not None:
            self._place.watch.waited("event", block, started)

    def leave(self, block: int) -> None:
        """The thread has issued the block's work, or failed to."""
        if self._place.watch is not None:
            self._place.watch.left(self.pass_id, block)
        self._place.stream.end_block()
        self._inside = None
        event = self._place.stream.record()
        if block not in self._residents:
            self._ring(BlockLeft(self.pass_id, block, self._passed_by, event))
            self._passed_by = ()
        self._place.note_issued(event)

    def keep_pace(self) -> None:
        """Block while the device is further behind than the thread may run ahead of it. To be called between blocks.

        :raises EngineBrokenError: if what the device was behind with failed.
        """
        try:
            self._place.keep_pace()
        except DeviceStreamError as failure:
            self._break_off(failure)

    def _break_off(self, failure: DeviceStreamError) -> NoReturn:
        """What fails on the device breaks the engine, not this pass alone; it may have been broken before."""
        self._ring(DeviceFailed(failure.cause))
        self._place.mailbox.check()
        raise EngineBrokenError(failure.cause) from failure.cause

    def end(self, *, completed: bool) -> None:
        """The pass is over. Idempotent."""
        if self._ended:
            return
        if self._inside is not None:  # an exception came between entering and leaving
            self._place.stream.end_block()
            self._inside = None
        self._ring(PassEnded(self.pass_id, completed, self._place.stream.record()))
        if self._place.watch is not None:
            self._place.watch.pass_ended(self.pass_id)
        self._ended = True  # last: rather told twice than never

    def count_hooks(self, cpu_s: float) -> None:
        """Take note of the thread's CPU time around one block, the block's own left out."""
        self._place.waits.hooks_cpu_s += cpu_s
        self._place.waits.num_blocks += 1
