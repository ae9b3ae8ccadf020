"""The retention policy at work: it watches the component boundaries and gives the allocator's cache back."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import attrs

from streamflow.stages.devices.base import Device
from streamflow.stages.events import (
    CacheDecided,
    ComponentArrived,
    ComponentFailed,
    ComponentLeft,
    ObservedEvent,
    PassEnded,
    WalkEnded,
)
from streamflow.stages.observers import Broadcast
from streamflow.stages.retention import BoundaryReading, Reason, Retention, RetentionPolicy
from streamflow.stages.threads import ThreadCrew

_KINDS = (ComponentArrived, ComponentLeft, ComponentFailed, PassEnded, WalkEnded)


class RetentionObserver:
    """Decides at every component boundary what is done with the allocator's cache. On the loop.

    A release waits for the whole device. So one that the policy decides is deferred while passes run (``is_busy``);
    one that a failure or a lack of memory forces is not.
    """

    def __init__(
        self,
        device: Device,
        crew: ThreadCrew,
        broadcast: Broadcast,
        is_busy: Callable[[], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._device = device
        self._crew = crew
        self._broadcast = broadcast
        self._is_busy = is_busy
        self._fail = fail
        self._policy = RetentionPolicy()
        self._deferred: Retention | None = None
        self._serving = anyio.CancelScope(shield=True)

    @property
    def budget(self) -> int:
        """Cached bytes that would be kept at the next boundary."""
        return self._policy.budget

    async def serve(self) -> None:
        """Watch until `stop`. What was learned is forgotten then: the components are detached."""
        with self._serving, self._broadcast.subscribe(kinds=_KINDS) as events:
            async for event in events:
                try:
                    await self._observe(event)
                except Exception as failure:  # the device failed: it does not even tell how much memory it has
                    self._fail(failure)
        self._policy.reset()

    def stop(self) -> None:
        """Watch no longer. Idempotent."""
        self._serving.cancel()

    async def release_now(self, reason: Reason, staged_bytes: int) -> None:
        """Give the cache back at once, whatever runs."""
        await self._carry_out(self._policy.force(self._reading(staged_bytes), reason))

    async def _observe(self, event: ObservedEvent) -> None:
        match event:
            case ComponentArrived(staged_bytes=staged) | ComponentLeft(staged_bytes=staged):
                await self._at_boundary(staged)
            case ComponentFailed(staged_bytes=staged):
                await self.release_now(Reason.FAILURE, staged)
            case PassEnded() | WalkEnded():
                await self._catch_up()

    async def _at_boundary(self, staged_bytes: int) -> None:
        decided = self._policy.decide(self._reading(staged_bytes))
        if decided.releases and self._is_busy():
            self._deferred = attrs.evolve(decided, deferred=True)
        else:
            await self._carry_out(decided)

    async def _catch_up(self) -> None:
        if self._deferred is not None and not self._is_busy():
            await self._carry_out(self._deferred)

    async def _carry_out(self, decided: Retention) -> None:
        if decided.releases:
            self._deferred = None
            await self._crew.call_through(self._device.release_cache)
        self._broadcast.publish(CacheDecided(decided))

    def _reading(self, staged_bytes: int) -> BoundaryReading:
        memory = self._device.memory()
        return BoundaryReading(staged_bytes, memory.peak, memory.cached, memory.free, memory.total)
