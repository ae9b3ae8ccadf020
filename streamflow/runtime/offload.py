"""The offload: what `open_offload` gives to its caller."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, ParamSpec, TypeVar

import attrs
from anyio.streams.memory import MemoryObjectReceiveStream

from streamflow.config import OffloadConfig
from streamflow.interrupts import uninterrupted
from streamflow.runtime.admission import Admission
from streamflow.runtime.component import StreamedComponent
from streamflow.runtime.requests import Request
from streamflow.runtime.statistics import OffloadStatistics, TransferChoice
from streamflow.runtime.work import check_result, check_work
from streamflow.stages.devices.base import Device
from streamflow.stages.engine import Engine
from streamflow.stages.errors import EngineBrokenError, EngineClosedError
from streamflow.stages.events import ObservedEvent
from streamflow.stages.observers import DEFAULT_CAPACITY
from streamflow.store.reports import StoreReport

Params = ParamSpec("Params")
Result = TypeVar("Result")

State = Literal["opening", "ready", "draining", "broken", "closed"]


@attrs.frozen
class ModelSizes:
    """Byte counts that do not change while the offload is open; see `OffloadStatistics`."""

    num_blocks: int
    num_resident_blocks: int
    model_bytes: int
    block_bytes: int
    fixed_bytes: int
    host_image_bytes: int


class Offload:
    """A model that streams. Made by `streamflow.open_offload` and its kin, which also close it.

    `run` may be awaited from any event loop and by many tasks; one request runs at a time, the others wait in order.
    """

    def __init__(
        self,
        *,
        config: OffloadConfig,
        device: Device,
        engine: Engine,
        component: StreamedComponent,
        admission: Admission,
        choice: TransferChoice,
        sizes: ModelSizes,
        store_report: StoreReport | None,
    ) -> None:
        self.config = config
        self._device = device
        self._engine = engine
        self._component = component
        self._admission = admission
        self._choice = choice
        self._sizes = sizes
        self._store_report = store_report
        self._phase: State = "ready"

    @property
    def state(self) -> State:
        """``ready``, ``draining`` (closing, while requests end), ``broken`` (an engine failure) or ``closed``."""
        if self._phase == "ready" and self._engine.failure is not None:
            return "broken"
        return self._phase

    @uninterrupted
    async def run(self, work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """What ``work(*args, **kwargs)`` returns: it is called in a thread of the offload's own, where the streamed
        model may be used. Grad and inference mode, autocast, default device and context variables of the caller are in
        force there. Device work queued on the caller's current stream comes before it; all of its own is done when this
        returns, and the result is the caller's for good.

        A cancelled call ends a forward at its next block boundary, waits until its thread and device work are done, and
        leaves the next request a clean window.

        :raises EngineClosedError: if the offload is closed, or is closed meanwhile.
        :raises EngineBrokenError: if the offload is broken, from the cause.
        :raises GradientError: if a streamed block is called with gradients enabled.
        :raises UnsuitableWorkError: if ``work`` is not callable, is an async function, or returns a coroutine.
        """
        check_work(work)
        self._check_open()
        caller = self._device.caller_stream()

        def call() -> Result:
            self._check_open()  # again: the request has waited
            return check_result(work, work(*args, **kwargs))

        return await Request(call, lambda place: self._component.request_in(place, caller)).run(self._admission)

    def statistics(self) -> OffloadStatistics:
        """Counters and sizes now. Cheap; from any thread."""
        return OffloadStatistics(
            state=self.state,
            device=str(self._device.torch_device),
            choice=self._choice,
            store=self._store_report,
            **attrs.asdict(self._sizes),
            num_running=self._admission.num_running,
            num_waiting=self._admission.num_waiting,
            engine=self._engine.statistics(),
        )

    def observe(
        self, capacity: int = DEFAULT_CAPACITY
    ) -> AbstractContextManager[MemoryObjectReceiveStream[ObservedEvent]]:
        """A channel of the engine's events from here on, on the offload's own loop; it ends when the offload closes.

        Observers are never waited for: one that lags more than ``capacity`` events behind loses the newest
        (``statistics().engine.num_dropped_events`` counts them).
        """
        return self._engine.broadcast.subscribe(capacity)

    def _check_open(self) -> None:
        if self._engine.failure is not None:
            raise EngineBrokenError(self._engine.failure) from self._engine.failure
        if self._phase != "ready":
            raise EngineClosedError

    async def drain(self) -> None:
        """Admit nobody, stop the requests that run, and return when all have ended. For the owner; idempotent."""
        self._phase = "draining"
        await self._admission.drain()

    def fail(self, error: BaseException) -> None:
        """Mark the offload broken: what it streams from is not what it should be. For the owner, on its loop."""
        self._engine.fail(error)

    def mark_closed(self) -> None:
        """All of it is gone. For the owner."""
        self._phase = "closed"

    def __repr__(self) -> str:
        num_blocks = self._sizes.num_blocks
        num_streamed = num_blocks - self._sizes.num_resident_blocks
        num_slots = min(self.config.window_blocks, num_streamed)
        return (
            f"<Offload {self.state}: {num_streamed} of {num_blocks} blocks "
            f"streamed to {self._device.torch_device} through {num_slots} slots, "
            f"{self._choice.transfer} from {self._choice.source}, {self._admission.num_running} running, "
            f"{self._admission.num_waiting} waiting>"
        )
