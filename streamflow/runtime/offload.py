"""The offload: what `open_offload` gives to its caller."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, ParamSpec, TypeVar

import attrs
from anyio.streams.memory import MemoryObjectReceiveStream

from streamflow.config import OffloadConfig
from streamflow.errors import ConfigurationError, ForkedOffloadError
from streamflow.interrupts import uninterrupted
from streamflow.runtime.offload_request import OffloadRequest
from streamflow.runtime.outcomes import OutcomeCounter
from streamflow.runtime.requests import Request
from streamflow.runtime.sizes import ModelSizes
from streamflow.runtime.statistics import OffloadStatistics, StagingStatistics
from streamflow.runtime.work import check_result, check_work
from streamflow.runtime.workplace import Workplace
from streamflow.stages.devices.base import Device
from streamflow.stages.engine import Engine
from streamflow.stages.errors import EngineBrokenError, EngineClosedError
from streamflow.stages.events import ObservedEvent
from streamflow.stages.observers import DEFAULT_CAPACITY
from streamflow.stages.ranks.signature import EachPass, WaveSignature
from streamflow.stages.residency import Residency
from streamflow.stages.statistics import EngineStatistics
from streamflow.stages.threads import open_threads
from streamflow.store.reports import StoreReport
from streamflow.trace.tracing import Tracing
from streamflow.transfer_choice import TransferChoice
from streamflow.weights.registering import RegistrationReport

Params = ParamSpec("Params")
Result = TypeVar("Result")

State = Literal["opening", "ready", "draining", "broken", "closed"]


class Offload:
    """A model that streams. Made by `streamflow.open_offload` and its kin, which also close it.

    `run` may be awaited from any event loop and by many tasks. As many requests run at once as ``max_running_requests``
    says; those that use the model together walk over its blocks together. The others wait in order.
    """

    def __init__(
        self,
        *,
        config: OffloadConfig,
        device: Device,
        engine: Engine,
        workplace: Workplace,
        residency: Residency | None,
        choice: TransferChoice,
        registration: RegistrationReport,
        sizes: ModelSizes,
        store_report: StoreReport | None,
        tracing: Tracing,
    ) -> None:
        self.config = config
        self._device = device
        self._engine = engine
        self._workplace = workplace
        self._admission = workplace.admission
        self._residency = residency
        self._choice = choice
        self._registration = registration
        self._sizes = sizes
        self._store_report = store_report
        self._outcomes = OutcomeCounter()
        self._uncounted: EngineStatistics | None = None
        self._numbers = itertools.count(1)
        self._opened_by = os.getpid()
        self._tracing = tracing
        self._phase: State = "ready"
        tracing.describe(transfer=attrs.asdict(choice), sizes=attrs.asdict(sizes))

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
        :raises OverloadedError: if as many requests wait as may.
        :raises ForkedOffloadError: if the offload was opened before this process was forked.
        :raises GradientError: if a streamed block is called with gradients enabled.
        :raises UnsuitableWorkError: if ``work`` is not callable, is an async function, or returns a coroutine.
        """
        return await self.request().run(work, *args, **kwargs)

    def request(
        self,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        request_id: str | None = None,
        wave: WaveSignature | None = None,
    ) -> OffloadRequest:
        """A request with options of its own, to be run once: ``await offload.request(deadline_s=60).run(work, ...)``.

        Of requests that wait, those of higher ``priority`` come first, and equals in their order. ``deadline_s``: how
        long `run` may take, in seconds, waiting included; None: for ever. ``request_id``: its name; None: a number.
        ``wave``: its steps, where ranks gather the weights together; None: those of the option ``default_wave``.

        :raises ConfigurationError: if an option is not usable.
        """
        problems = list(_request_problems(priority, deadline_s, request_id, wave))
        if problems:
            raise ConfigurationError(problems)
        return OffloadRequest(
            self._prepare,
            self._admission,
            self._outcomes,
            request_id=f"request {next(self._numbers)}" if request_id is None else request_id,
            priority=priority,
            deadline_s=deadline_s,
            wave=wave,
        )

    async def run_uncounted(self, work: Callable[[], Any]) -> Any:
        """`run` for a dummy request of the owner's: when it has ended, `statistics` begins anew.

        Where ranks gather the weights together each of its passes is a wave: what ``work`` does is not known.
        """
        uncounted = OffloadRequest(
            self._prepare,
            self._admission,
            OutcomeCounter(),
            request_id="warm-up",
            priority=0,
            deadline_s=None,
            wave=EachPass(),
        )
        try:
            return await uncounted.run(work)
        finally:
            self._uncounted = self._engine.statistics()

    def _prepare(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request[Any]:
        check_work(work)
        self._check_open()
        caller = self._device.caller_stream()

        def call() -> Any:
            self._check_sound()  # the request has waited
            return check_result(work, work(*args, **kwargs))

        return Request(call, lambda place: self._workplace.request_in(place, caller))

    def statistics(self) -> OffloadStatistics:
        """Counters and sizes now. Cheap; from any thread."""
        occupancy = self._admission.occupancy()
        return OffloadStatistics(
            state=self.state,
            device=str(self._device.torch_device),
            choice=self._choice,
            store=self._store_report,
            registration=self._registration,
            **attrs.asdict(self._sizes, recurse=False),
            staging=self._staging(),
            num_running=len(occupancy.running),
            num_waiting=len(occupancy.waiting),
            occupancy=occupancy,
            outcomes=self._outcomes.counts,
            serialised_by=self._workplace.serialised_by,
            engine=self._engine.statistics().since(self._uncounted),
        )

    def _staging(self) -> StagingStatistics | None:
        residency = self._residency
        if residency is None:
            return None
        return StagingStatistics(
            staged_bytes=residency.staged_bytes,
            staged_peak_bytes=residency.peak_bytes,
            budget_bytes=residency.budget_bytes,
            num_waiting=residency.num_waiting,
        )

    def observe(
        self, capacity: int = DEFAULT_CAPACITY
    ) -> AbstractContextManager[MemoryObjectReceiveStream[ObservedEvent]]:
        """A channel of the engine's events from here on, on the offload's own loop; it ends when the offload closes.

        Observers are never waited for: one that lags more than ``capacity`` events behind loses the newest
        (``statistics().engine.num_dropped_events`` counts them).
        """
        return self._engine.broadcast.subscribe(capacity)

    async def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace of what happened up to now to ``path`` (compressed where its name ends with ``.gz``).

        From any loop, also after closing. Spans that are under way are left out. A cancelled call writes it all the
        same. See docs/trace-schema.md for what is in it, and ``streamflow trace`` for what reads it.

        :raises TraceOffError: if neither ``trace_path`` nor ``trace_events`` was given.
        :raises TraceWriteError: if the file cannot be written; one that was there is still there then.
        """
        async with open_threads() as crew:
            await crew.call_through(lambda: self._tracing.write(path))

    def _check_open(self) -> None:
        if os.getpid() != self._opened_by:
            raise ForkedOffloadError(self._opened_by, os.getpid())
        self._check_sound()
        if self._phase != "ready":
            raise EngineClosedError

    def _check_sound(self) -> None:
        if self._engine.failure is not None:
            raise EngineBrokenError(self._engine.failure) from self._engine.failure

    async def drain(self) -> None:
        """Admit nobody; serve or stop the requests that run and wait, as ``close_mode`` says; return when all have
        ended. For the owner; idempotent.
        """
        self._phase = "draining"
        await self._admission.close(self.config.close_deadline_s if self.config.close_mode == "drain" else 0.0)

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


def _request_problems(priority: object, deadline_s: object, request_id: object, wave: object) -> Iterator[str]:
    if isinstance(priority, bool) or not isinstance(priority, int):
        yield f"priority must be an integer, not {priority!r}"
    if deadline_s is not None and (isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float))):
        yield f"deadline_s must be a number of seconds or None, not {deadline_s!r}"
    elif deadline_s is not None and not 0 < deadline_s < math.inf:
        yield f"deadline_s is {deadline_s} but must be more than 0 seconds; None is no deadline"
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        yield f"request_id must be a name or None, not {request_id!r}"
    if wave is not None and not isinstance(wave, WaveSignature):
        yield f"wave must be a WaveSignature or None, not {wave!r}"
