"""A request with options of its own: what `Offload.request` makes, and `Offload.run` makes with the defaults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

import anyio

from streamflow.errors import DeadlineExceededError, RequestReusedError
from streamflow.interrupts import uninterrupted
from streamflow.request_ids import working_for
from streamflow.runtime.admission import Admission, Turn
from streamflow.runtime.outcomes import OutcomeCounter
from streamflow.runtime.requests import Request
from streamflow.runtime.shared_state import shared_state_of
from streamflow.spans import request_span
from streamflow.stages.errors import StreamflowError
from streamflow.stages.ranks.signature import WaveNeed

Params = ParamSpec("Params")
Result = TypeVar("Result")

Phase = Literal["new", "waiting", "running", "done"]


class OffloadRequest:
    """One request, to be `run` once. Made by `Offload.request`; it holds nothing that would have to be given back.

    ``request_id`` names it in errors, events, statistics, spans and logs (`RequestIdFilter`). `phase` and `position`
    may be looked at from any thread.
    """

    def __init__(
        self,
        prepare: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Request[Any]],
        admission: Admission,
        outcomes: OutcomeCounter,
        *,
        request_id: str,
        priority: int,
        deadline_s: float | None,
        wave: WaveNeed | None = None,
    ) -> None:
        self.request_id = request_id
        self.priority = priority
        self.deadline_s = deadline_s
        self.wave = wave
        self._prepare = prepare
        self._admission = admission
        self._outcomes = outcomes
        self._turn: Turn | None = None
        self._is_begun = False
        self._is_done = False

    @property
    def phase(self) -> Phase:
        """``new`` before `run`, ``waiting`` for others to end, ``running``, and ``done`` whatever came of it."""
        if self._is_done:
            return "done"
        if not self._is_begun:
            return "new"
        return "waiting" if self._turn is None or self._turn.waits else "running"

    @property
    def position(self) -> int | None:
        """How many requests come before it, 0 for the next one; None unless it waits."""
        return None if self._turn is None else self._admission.position(self._turn)

    @uninterrupted
    async def run(self, work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """What ``work(*args, **kwargs)`` returns; see `Offload.run`, also for what else it raises. The deadline counts
        from here.

        :raises DeadlineExceededError: if it is not done at its deadline. Its thread and device work have ended then.
        :raises RequestReusedError: if it was run before.
        """
        if self._is_begun:
            raise RequestReusedError(self.request_id)
        self._is_begun = True
        try:
            with working_for(self.request_id), request_span(self.request_id, self.priority, self.deadline_s):
                result = await self._run_until_deadline(work, args, kwargs)
        except BaseException as failure:
            self._is_done = True
            self._outcomes.note(failure)
            if isinstance(failure, StreamflowError):
                failure.request_id = self.request_id
            raise
        self._is_done = True
        self._outcomes.note(None)
        return result

    async def _run_until_deadline(
        self, work: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Result:
        request: Request[Result] = self._prepare(work, args, kwargs)
        turn = self._turn = self._admission.enter(
            request,
            priority=self.priority,
            request_id=self.request_id,
            wave=self.wave,
            exclusive=shared_state_of(partial(work, *args, **kwargs)),
        )
        try:
            with anyio.move_on_after(self.deadline_s):
                return await request.wait(self._admission, turn)
        except BaseException:
            self._admission.leave(turn)  # also of an interrupt that comes before `wait` could do so
            raise
        phase = "waiting" if turn.withdrawn else "running"
        raise DeadlineExceededError(self.request_id, self.deadline_s or 0.0, phase)
