"""Every metric that is read from statistics: its name, what it means, and where its value comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_args

import attrs
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)

from streamflow._version import __version__
from streamflow.runtime.offload import State
from streamflow.runtime.statistics import OffloadStatistics

#: Label values, in the order of a family's labels, to the value.
Values = Mapping[tuple[str, ...], float]


@attrs.frozen
class Family:
    """A counter or a gauge: ``labels`` beside ``model``, and ``read`` for its values. No values: nothing is said."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    meaning: str
    read: Callable[[OffloadStatistics], Values]
    labels: tuple[str, ...] = ()

    def collect(self, statistics: Mapping[str, OffloadStatistics]) -> Metric:
        family = self.kind(f"streamflow_{self.name}", self.meaning, labels=("model", *self.labels))
        for model, snapshot in statistics.items():
            for labels, value in self.read(snapshot).items():
                family.add_metric((model, *labels), value)
        return family


def _counter(name: str, meaning: str, read: Callable[[OffloadStatistics], float]) -> Family:
    return Family(CounterMetricFamily, name, meaning, lambda statistics: {(): read(statistics)})


def _gauge(name: str, meaning: str, read: Callable[[OffloadStatistics], float]) -> Family:
    return Family(GaugeMetricFamily, name, meaning, lambda statistics: {(): read(statistics)})


def _waits(statistics: OffloadStatistics) -> Values:
    engine = statistics.engine
    return {
        ("fetch",): engine.mailbox_wait_s,
        ("copy",): engine.event_wait_s,
        ("run_ahead",): engine.run_ahead_wait_s,
    }


def _device_bytes(statistics: OffloadStatistics) -> Values:
    engine, staging = statistics.engine, statistics.staging
    return {
        ("window",): engine.window_bytes,
        ("resident",): engine.resident_bytes,
        ("scratch",): engine.scratch_bytes,
        ("fixed",): statistics.fixed_bytes,
        **({} if staging is None else {("staged",): staging.staged_bytes}),
    }


def _host_bytes(statistics: OffloadStatistics) -> Values:
    return {("images",): statistics.host_image_bytes, ("staging",): statistics.engine.staging_bytes}


def _staged_peak(statistics: OffloadStatistics) -> Values:
    staging = statistics.staging
    return {} if staging is None else {(): staging.staged_peak_bytes}


def _budget(statistics: OffloadStatistics) -> Values:
    staging = statistics.staging
    return {} if staging is None or staging.budget_bytes is None else {(): staging.budget_bytes}


def _waiting_for_components(statistics: OffloadStatistics) -> Values:
    staging = statistics.staging
    return {} if staging is None else {(): staging.num_waiting}


def _blocks(statistics: OffloadStatistics) -> Values:
    resident = statistics.num_resident_blocks
    return {("resident",): resident, ("streamed",): statistics.num_blocks - resident}


def _outcomes(statistics: OffloadStatistics) -> Values:
    return {(name,): count for name, count in attrs.asdict(statistics.outcomes).items()}


def _store_outcome(statistics: OffloadStatistics) -> Values:
    report = statistics.store
    return {} if report is None else {(str(report.outcome), "" if report.code is None else str(report.code)): 1}


FAMILIES = (
    _counter("streamed_bytes", "Bytes of blocks that were fetched into the window.", lambda s: s.engine.streamed_bytes),
    _counter("fetches", "Blocks that were fetched into the window.", lambda s: s.engine.num_fetches),
    _counter(
        "on_demand_fetches",
        "Fetches that nothing had foreseen: a pass stood before the block.",
        lambda s: s.engine.num_on_demand_fetches,
    ),
    _counter("walks", "Walks over a component's blocks.", lambda s: s.engine.num_walks),
    _counter("passes", "Forward calls of a component.", lambda s: s.engine.num_passes),
    _counter("blocks_run", "Blocks that passes ran.", lambda s: s.engine.num_blocks_run),
    Family(
        CounterMetricFamily,
        "wait_seconds",
        "Host time for which compute threads stood still: for the fetch of a block to be issued, for its copy (on a "
        "host device), or because they were as far ahead of the device as they may be.",
        _waits,
        ("cause",),
    ),
    _counter(
        "fetch_waits", "Blocks whose fetch was not issued yet when a pass came.", lambda s: s.engine.num_mailbox_waits
    ),
    _counter(
        "hook_cpu_seconds", "CPU time of what comes between a model and its blocks.", lambda s: s.engine.hooks_cpu_s
    ),
    _counter(
        "slow_device_calls",
        "Device calls that kept the event loop for over 5 ms.",
        lambda s: s.engine.num_slow_device_calls,
    ),
    _counter("late_messages", "Messages that came after closing.", lambda s: s.engine.num_late_messages),
    _counter("dropped_events", "Events that slow observers have lost.", lambda s: s.engine.num_dropped_events),
    Family(CounterMetricFamily, "requests", "Requests that ended, by how.", _outcomes, ("outcome",)),
    _gauge("requests_running", "Requests and direct calls that have a place.", lambda s: s.num_running),
    _gauge("requests_waiting", "Requests and direct calls that wait for a place.", lambda s: s.num_waiting),
    _gauge(
        "longest_stop_seconds",
        "The longest that a request needed to end after it was told to stop.",
        lambda s: s.occupancy.longest_stop_s,
    ),
    Family(GaugeMetricFamily, "device_bytes", "Device memory that streamflow holds, by use.", _device_bytes, ("use",)),
    _gauge("device_peak_bytes", "Device memory that streamflow held at most.", lambda s: s.engine.device_peak_bytes),
    Family(
        GaugeMetricFamily, "host_bytes", "Private host memory that streamflow holds, by use.", _host_bytes, ("use",)
    ),
    _gauge(
        "registered_bytes", "Bytes of mapped files that are page-locked.", lambda s: s.registration.registered_bytes
    ),
    Family(
        GaugeMetricFamily, "staged_peak_bytes", "What components that move had on the device at most.", _staged_peak
    ),
    Family(GaugeMetricFamily, "staging_budget_bytes", "What components that move may have there.", _budget),
    Family(
        GaugeMetricFamily,
        "requests_waiting_for_component",
        "Requests that wait for a component to come to the device.",
        _waiting_for_components,
    ),
    _gauge("model_bytes", "Bytes of all weights of the model.", lambda s: s.model_bytes),
    Family(GaugeMetricFamily, "blocks", "Blocks of the model, by whether they stream.", _blocks, ("kind",)),
    Family(
        GaugeMetricFamily,
        "store_outcome",
        "1 for what the host weight store did at opening, with the code of what went wrong.",
        _store_outcome,
        ("outcome", "code"),
    ),
)


def collect(statistics: Mapping[str, OffloadStatistics]) -> Iterator[Metric]:
    """Every family, with the values of each model by its name."""
    yield from (family.collect(statistics) for family in FAMILIES)
    yield _states(statistics)
    yield _infos(statistics)


def _states(statistics: Mapping[str, OffloadStatistics]) -> Metric:
    family = StateSetMetricFamily("streamflow_state", "The state of the offload.", labels=("model",))
    for model, snapshot in statistics.items():
        family.add_metric((model,), {state: state == snapshot.state for state in get_args(State)})
    return family


def _infos(statistics: Mapping[str, OffloadStatistics]) -> Metric:
    family = InfoMetricFamily("streamflow_offload", "Where a model's blocks come from, and how.", labels=("model",))
    for model, snapshot in statistics.items():
        choice = snapshot.choice
        said = {"source": choice.source, "transfer": choice.transfer, "device": snapshot.device, "version": __version__}
        family.add_metric((model,), said)
    return family
