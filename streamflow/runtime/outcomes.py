"""What became of requests, counted."""

from __future__ import annotations

import threading

import attrs

from streamflow.errors import DeadlineExceededError, OverloadedError
from streamflow.stages.errors import EngineClosedError


@attrs.frozen
class RequestOutcomes:
    """How many requests ended how; direct calls of the model are not counted.

    ``failed``: by an exception of the work or of the engine. ``closed``: stopped or refused because the offload closes.
    """

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    deadline_exceeded: int = 0
    overloaded: int = 0
    closed: int = 0


class OutcomeCounter:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = RequestOutcomes()

    @property
    def counts(self) -> RequestOutcomes:
        """The counts now."""
        return self._counts

    def note(self, failure: BaseException | None) -> None:
        """Count a request that ended by ``failure``; None: it completed."""
        name = _outcome_of(failure)
        with self._lock:
            self._counts = attrs.evolve(self._counts, **{name: getattr(self._counts, name) + 1})


def _outcome_of(failure: BaseException | None) -> str:
    match failure:
        case None:
            return "completed"
        case DeadlineExceededError():
            return "deadline_exceeded"
        case OverloadedError():
            return "overloaded"
        case EngineClosedError():
            return "closed"
        case Exception():
            return "failed"
    return "cancelled"
