"""Metrics say what an offload is and did, in Prometheus' own words, while it runs, fails and closes."""

from __future__ import annotations

import re
import subprocess
import sys

import anyio
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics

import streamflow
from streamflow import Offload
from streamflow.errors import ModelNameTakenError
from streamflow.metrics.collector import OffloadCollector
from streamflow.metrics.families import FAMILIES
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.kit import ready
from tests.streamflow.runtime.kit import Subject, make_subject, until_so

pytestmark = pytest.mark.anyio


def registered(collector: OffloadCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"streamflow_{name}", {"model": "m", **labels})


async def run_some(offload: Offload, subject: Subject) -> None:
    """Two requests together, and one that fails."""

    def fail() -> None:
        raise ValueError

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(offload.run, subject.forward)
        tasks.start_soon(offload.run, subject.forward)
    with pytest.raises(ValueError):  # noqa: PT011 - raised above
        await offload.run(fail)


async def test_counters_and_sizes_are_those_of_the_statistics() -> None:
    subject = make_subject()
    collector = OffloadCollector(link_bytes_per_s=55e9)
    registry = registered(collector)
    async with streamflow.open_offload(subject.model, {"resident_blocks": 1}) as offload:
        async with collector.watching(offload, "m"):
            await run_some(offload, subject)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await offload.run(subject.forward)
            await subject.check_next(offload)
            said = offload.statistics()
            assert value(registry, "streamed_bytes_total") == said.engine.streamed_bytes > 0
            assert value(registry, "fetches_total") == said.engine.num_fetches
            assert value(registry, "passes_total") == said.engine.num_passes >= 3
            assert value(registry, "requests_total", outcome="completed") == 3
            assert value(registry, "requests_total", outcome="failed") == 1
            assert value(registry, "requests_total", outcome="cancelled") == 1
            assert value(registry, "requests_total", outcome="overloaded") == 0
            assert value(registry, "blocks", kind="resident") == 1
            assert value(registry, "blocks", kind="streamed") == subject.num_blocks - 1
            assert value(registry, "device_bytes", use="window") == said.engine.window_bytes > 0
            assert value(registry, "state", streamflow_state="ready") == 1
            assert value(registry, "state", streamflow_state="closed") == 0
            assert value(registry, "requests_running") == value(registry, "requests_waiting") == 0
            assert value(registry, "wait_seconds_total", cause="fetch") == said.engine.mailbox_wait_s
            assert registry.get_sample_value("streamflow_link_capacity_bytes_per_second") == 55e9
        assert value(registry, "passes_total") is None, "an offload that is watched no more is shown"


async def test_histograms_count_walks_and_the_time_of_requests() -> None:
    subject = make_subject()
    collector = OffloadCollector()
    registry = registered(collector)
    async with streamflow.open_offload(subject.model, {"admission_window_s": 0.05}) as offload:
        async with collector.watching(offload, "m"):
            await run_some(offload, subject)
            await subject.check_next(offload)  # no pass is under way any more
            engine = offload.statistics().engine
            await until_so(lambda: value(registry, "walk_seconds_count") == engine.num_walks)
            assert value(registry, "walk_passes_count") == engine.num_walks
            assert value(registry, "walk_passes_sum") == engine.num_passes
            await until_so(lambda: value(registry, "request_running_seconds_count") == 4)
            assert 0 < (value(registry, "walk_seconds_sum") or 0) < 60
        assert value(registry, "walk_seconds_count") is None


async def test_a_store_outcome_is_said_where_there_is_a_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    subject = make_subject()
    collector = OffloadCollector()
    registry = registered(collector)
    store = {"root": tmp_path_factory.mktemp("store"), "free_space_headroom_bytes": 0}
    for expected in ("published", "local_hit"):
        async with streamflow.open_offload(subject.model, {"store_mode": "preferred", "store": store}) as offload:
            with collector.counting(offload, "m"):
                assert value(registry, "store_outcome", outcome=expected, code="") == 1


async def test_two_offloads_have_two_names_and_no_name_stands_for_two() -> None:
    first, second = make_subject(), make_subject(num_blocks=3)
    collector = OffloadCollector()
    registry = registered(collector)
    async with (
        streamflow.open_offload(first.model) as one,
        streamflow.open_offload(second.model) as other,
        collector.watching(one, "m"),
        collector.watching(other, "n"),
    ):
        assert registry.get_sample_value("streamflow_blocks", {"model": "m", "kind": "streamed"}) == 5
        assert registry.get_sample_value("streamflow_blocks", {"model": "n", "kind": "streamed"}) == 3
        with pytest.raises(ModelNameTakenError, match=r"'m'.*name of its own"):
            async with collector.watching(other, "m"):
                pytest.fail("watched under a name that was taken")
        assert registry.get_sample_value("streamflow_blocks", {"model": "m", "kind": "streamed"}) == 5


async def test_an_offload_on_a_loop_thread_of_its_own_is_counted() -> None:
    subject = make_subject()
    collector = OffloadCollector()
    registry = registered(collector)
    started = await streamflow.start_offload(subject.model)
    try:
        with collector.counting(started, "m"):
            assert await started.run(subject.forward) == subject.expected
            assert value(registry, "passes_total") == 1
    finally:
        await started.aclose()


async def test_the_error_of_a_body_leaves_as_it_is() -> None:
    subject = make_subject()
    collector = OffloadCollector()
    async with streamflow.open_offload(subject.model) as offload:
        with pytest.raises(LookupError):
            async with collector.watching(offload, "m"):
                raise LookupError
        async with collector.watching(offload, "m"):
            await subject.check_next(offload)


async def test_names_and_meanings_follow_the_conventions() -> None:
    subject = make_subject()
    collector = OffloadCollector(link_bytes_per_s=1e9)
    registry = registered(collector)
    async with streamflow.open_offload(subject.model) as offload, collector.watching(offload, "m"):
        await offload.run(subject.forward)
        for text in (generate_latest(registry).decode(), openmetrics.generate_latest(registry).decode()):
            names = set(re.findall(r"^# HELP (\S+) \S.*[.]$", text, flags=re.MULTILINE))
            assert names == set(re.findall(r"^# TYPE (\S+) ", text, flags=re.MULTILINE))
            assert all(re.fullmatch(r"streamflow_[a-z_]+", name) for name in names)
            assert not [name for name in names if re.search(r"_(s|ms|kb|num|count)(_total)?$", name)]
    for family in FAMILIES:
        assert not family.name.endswith("_total"), "the library appends it to counters"
        assert family.kind is CounterMetricFamily or "total" not in family.name


def test_who_does_not_ask_for_metrics_does_not_import_their_library() -> None:
    code = "import sys, streamflow; streamflow.open_offload; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


async def test_components_that_move_and_what_is_done_with_the_cache_are_counted() -> None:
    given = ready(FLUX)
    collector = OffloadCollector()
    registry = registered(collector)
    opened = streamflow.open_offload(given.pipeline, device=FarCpuDevice())
    async with opened as offload, collector.watching(offload, "m"):
        await given.check(offload)
        for component in FLUX.staged:
            await until_so(lambda name=component: value(registry, "component_arrivals_total", component=name) == 1)
        decided = {"action": "released", "reason": "telemetry_missing"}
        await until_so(lambda: value(registry, "retention_decisions_total", **decided) is not None)
        staging = offload.statistics().staging
        assert staging is not None
        assert value(registry, "staged_peak_bytes") == staging.staged_peak_bytes > 0
        assert value(registry, "requests_waiting_for_component") == 0
        assert value(registry, "component_failures_total", component="vae") is None
