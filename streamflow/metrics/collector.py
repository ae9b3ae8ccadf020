"""The collector: what offloads are and did, for a registry of prometheus_client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from anyio.streams.memory import MemoryObjectReceiveStream
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamflow.errors import ModelNameTakenError
from streamflow.facade import StartedOffload
from streamflow.metrics.event_metrics import EventMetrics
from streamflow.metrics.families import collect
from streamflow.runtime.offload import Offload
from streamflow.stages.events import ObservedEvent
from streamflow.stages.threads import open_tasks


class OffloadCollector(Collector):
    """Metrics of offloads, each under the label ``model``; ``registry.register(collector)`` lets a registry show them.

    Collecting takes no lock that a request holds and asks no device to finish anything: a scrape may come at any time,
    in any thread. ``link_bytes_per_s`` is what the host link can carry, if you know it: link use is then
    ``rate(streamflow_streamed_bytes_total[1m]) / streamflow_link_capacity_bytes_per_second``.
    """

    def __init__(self, *, link_bytes_per_s: float | None = None) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._offloads: dict[str, Offload | StartedOffload] = {}
        self._of_events = EventMetrics()

    @contextmanager
    def counting(self, offload: Offload | StartedOffload, model: str) -> Iterator[None]:
        """Within it the collector shows what ``offload.statistics()`` says. From any thread.

        :raises ModelNameTakenError: if ``model`` is the name of another offload.
        """
        if self._offloads.setdefault(model, offload) is not offload:
            raise ModelNameTakenError(model)
        try:
            yield
        finally:
            self._offloads.pop(model, None)

    @asynccontextmanager
    async def watching(self, offload: Offload, model: str) -> AsyncIterator[None]:
        """`counting`, and what only events tell, too. On the offload's own loop.

        :raises ModelNameTakenError: if ``model`` is the name of another offload.
        """
        with self.counting(offload, model), offload.observe() as events:
            async with open_tasks() as tasks:
                tasks.start_soon(self._follow, model, events, name=f"metrics of {model}")
                try:
                    yield
                finally:
                    tasks.cancel_scope.cancel()
                    self._of_events.forget(model)

    async def _follow(self, model: str, events: MemoryObjectReceiveStream[ObservedEvent]) -> None:
        async for event in events:
            self._of_events.note(model, event)

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        yield from collect({model: offload.statistics() for model, offload in list(self._offloads.items())})
        yield from self._of_events.collect()
        if self._link_bytes_per_s is not None:
            meaning = "Bytes per second that the host link can carry, as it was said."
            yield GaugeMetricFamily("streamflow_link_capacity_bytes_per_second", meaning, self._link_bytes_per_s)
