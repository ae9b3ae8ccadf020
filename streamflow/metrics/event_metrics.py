"""What only events tell: of walks, of the time for which requests have a place, and of components that move."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import attrs
from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric

from streamflow.stages.events import (
    CacheDecided,
    ComponentArrived,
    ComponentFailed,
    ObservedEvent,
    RequestEnded,
    RequestStarted,
    WalkEnded,
    WalkJoined,
    WalkStarted,
)

_PASSES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


@attrs.define
class _Walk:
    walk_id: int
    began_at: float
    num_passes: int


class EventMetrics:
    """Histograms and counters of any number of models.

    `note` is for the loop of the model's offload, `collect` for any thread.

    Events may be lost before they come here: what has lost its beginning or its end is not counted.
    """

    def __init__(self) -> None:
        self._walk_passes = _histogram("walk_passes", "Passes that shared a walk.", _PASSES)
        self._walk_seconds = _histogram("walk_seconds", "Time from a walk's beginning to its end.", _SECONDS)
        self._running_seconds = _histogram(
            "request_running_seconds", "Time for which a request or a direct call had a place.", _SECONDS
        )
        self._arrivals = _counter("component_arrivals", "Times that a component came to the device.", "component")
        self._failures = _counter("component_failures", "Components that could not come, or failed.", "component")
        self._retention = _counter(
            "retention_decisions", "What was done with the allocator's cache, and why.", "action", "reason"
        )
        self._walks: dict[str, _Walk] = {}
        self._places: dict[tuple[str, int], float] = {}

    def note(self, model: str, event: ObservedEvent) -> None:
        """Count ``event``, which happened just now."""
        match event:
            case WalkStarted(walk_id, _, pass_ids):
                self._walks[model] = _Walk(walk_id, time.monotonic(), len(pass_ids))
            case WalkJoined(walk_id, pass_ids) if (walk := self._walks.get(model)) and walk.walk_id == walk_id:
                walk.num_passes += len(pass_ids)
            case WalkEnded(walk_id) if (walk := self._walks.pop(model, None)) and walk.walk_id == walk_id:
                self._walk_passes.labels(model).observe(walk.num_passes)
                self._walk_seconds.labels(model).observe(time.monotonic() - walk.began_at)
            case RequestStarted(_, place):
                self._places[model, place] = time.monotonic()
            case RequestEnded(_, place) if (model, place) in self._places:
                self._running_seconds.labels(model).observe(time.monotonic() - self._places.pop((model, place)))
            case ComponentArrived(component):
                self._arrivals.labels(model, component).inc()
            case ComponentFailed(component):
                self._failures.labels(model, component).inc()
            case CacheDecided(retention):
                action = "released" if retention.releases else "kept"
                self._retention.labels(model, action, str(retention.reason)).inc()

    def forget(self, model: str) -> None:
        """Nothing more comes of ``model``."""
        self._walks.pop(model, None)
        for key in [key for key in self._places if key[0] == model]:
            del self._places[key]
        for metric in self._all():
            metric.remove_by_labels({"model": model})

    def collect(self) -> Iterator[Metric]:
        for metric in self._all():
            yield from metric.collect()

    def _all(self) -> Iterable[Histogram | Counter]:
        histograms = (self._walk_passes, self._walk_seconds, self._running_seconds)
        return (*histograms, self._arrivals, self._failures, self._retention)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"streamflow_{name}", meaning, ("model",), registry=None, buckets=buckets)


def _counter(name: str, meaning: str, *labels: str) -> Counter:
    return Counter(f"streamflow_{name}", meaning, ("model", *labels), registry=None)
