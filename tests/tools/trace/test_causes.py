"""The report names the right cause of runs whose cause is known, and its numbers are those of the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from streamflow.stages.images import MemoryPiece
from streamflow.tools.trace.advice import advise
from streamflow.tools.trace.analysis import ComponentReport, analyse
from streamflow.tools.trace.reading import read_trace
from tests.tools.trace.constructed import slow_rank, span
from tests.tools.trace.runs import NBYTES, NUM_BLOCKS, NUM_WALKS, block_the_loop, run_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def report_on(path: Path) -> ComponentReport:
    (report,) = analyse(read_trace(path))
    assert report.problems == []
    assert report.sum_of("compute_s") > 0
    for walk in report.walks:
        if walk.num_passes == 1:  # of several, one computes while another waits
            assert walk.blocked_s + walk.seconds_by_cause["outside"] + walk.compute_s <= walk.seconds * 1.02
    return report


def first_advice(path: Path, report: ComponentReport) -> str:
    return advise(report, read_trace(path)["streamflow"])[0].text


async def test_a_slow_link(path: Path) -> None:
    await run_model(path, compute_s=0.01, transfer_s=0.03)
    report = report_on(path)
    assert report.bound_by == "transfer"
    assert 0.5 < report.link_bytes_per_s / (NBYTES / 0.03) <= 1.01
    assert report.sum_of("link_limit_s") > 1.5 * report.sum_of("compute_limit_s")
    assert report.sum_of("link_busy_s") > 0.6 * report.sum_of("seconds")
    assert "more resident blocks" in first_advice(path, report)


async def test_slow_packing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = MemoryPiece.read_into

    def read_slowly(self: MemoryPiece, address: int, start: int, nbytes: int) -> None:
        time.sleep(0.03)
        read_into(self, address, start, nbytes)

    monkeypatch.setattr(MemoryPiece, "read_into", read_slowly)
    await run_model(path, compute_s=0.01, transfer_s=0.01, options={"transfer": "staged", "packing_threads": 1})
    report = report_on(path)
    assert report.bound_by == "packing"
    assert "direct transfer" in first_advice(path, report)


async def test_a_blocked_loop(path: Path) -> None:
    await run_model(path, compute_s=0.015, transfer_s=0.013, meanwhile=block_the_loop)
    report = report_on(path)
    assert report.bound_by == "loop"
    assert report.worst_answer_s > 0.03
    assert "event loop" in first_advice(path, report)


async def test_a_window_of_one(path: Path) -> None:
    await run_model(path, compute_s=0.02, transfer_s=0.02, options={"window_blocks": 1})
    report = report_on(path)
    assert report.bound_by == "slot"
    assert "window_blocks=2" in first_advice(path, report)
    # a wider window would hide as much of the transfer as there is computing
    assert report.by_cause()["slot"] == pytest.approx(NUM_WALKS * NUM_BLOCKS * 0.02, rel=0.4)


async def test_fetches_on_demand(path: Path) -> None:
    orders = [[5, 0, 7, 2, 6, 1, 4, 3], [3, 6, 0, 5, 2, 7, 4, 1], [1, 5, 3, 7, 0, 4, 6, 2]]
    await run_model(path, compute_s=0.02, transfer_s=0.015, orders=orders)
    report = report_on(path)
    assert report.bound_by == "on_demand"
    assert report.num_on_demand > NUM_BLOCKS
    assert "foreseeable order" in first_advice(path, report)


async def test_compute(path: Path) -> None:
    await run_model(path, compute_s=0.03, transfer_s=0.01, options={"resident_blocks": 2})
    report = report_on(path)
    assert report.bound_by == "compute"
    assert report.sum_of("seconds") == pytest.approx(report.sum_of("best_s"), rel=0.2)
    assert report.sum_of("overlap_s") > 0.7 * report.sum_of("link_busy_s")
    assert "fewer would cost no time" in advise(report, read_trace(path)["streamflow"])[-1].text


def test_a_slow_rank() -> None:
    trace = slow_rank(num_blocks=6, waits_for=3)
    (report,) = analyse(trace)
    assert (report.bound_by, report.slowest_rank) == ("gather", 3)
    assert "rank 3" in advise(report, trace["streamflow"])[0].text
    assert report.by_cause()["gather"] == pytest.approx(5 * 0.03)
    (report,) = analyse(slow_rank(num_blocks=6, waits_for=None))
    assert report.bound_by == "transfer"


def test_a_rank_alone_does_not_know_which_rank_was_slow() -> None:
    trace = slow_rank(num_blocks=6, waits_for=3)
    for gather in gathers_of(trace):
        gather["args"].update(waited_us=None, last_rank=None)
    (report,) = analyse(trace)
    assert (report.bound_by, report.slowest_rank) == ("gather", None)
    assert report.by_cause()["gather"] == pytest.approx(5 * 0.03)
    assert "streamflow trace merge" in advise(report, trace["streamflow"])[0].text


def test_no_rank_is_waited_for_while_the_blocks_own_bytes_are_on_the_link() -> None:
    trace = slow_rank(num_blocks=6, waits_for=3)
    for gather in gathers_of(trace):
        args = {name: gather["args"][name] for name in ("block", "fetch", "nbytes")}
        trace["traceEvents"].append(span(300, "copy", gather["ts"], gather["ts"] + gather["dur"] / 3, **args))
    (report,) = analyse(trace)
    assert report.by_cause()["gather"] == pytest.approx(5 * 0.02)


def gathers_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "gather"]


def test_retries_of_the_allocator() -> None:
    trace = slow_rank(num_blocks=6, waits_for=None, outside_s=0.1, retries=[4, 6])
    (report,) = analyse(trace)
    assert (report.bound_by, report.num_retries) == ("allocator", 2)
    assert "2 times" in advise(report, trace["streamflow"])[0].text


async def test_every_walk_is_in_the_report(path: Path) -> None:
    await run_model(path, compute_s=0.002, transfer_s=0.002)
    report = report_on(path)
    assert [(walk.walk_id, walk.num_passes) for walk in report.walks] == [(i + 1, 1) for i in range(NUM_WALKS)]
    assert sum(walk.streamed_bytes for walk in report.walks) <= NBYTES * (NUM_BLOCKS * NUM_WALKS + 2)
    assert all(walk.seconds >= NUM_BLOCKS * 0.002 for walk in report.walks)


async def test_what_an_earlier_event_was_dropped_with_is_missed_by_nobody(path: Path) -> None:
    await run_model(path, compute_s=0.002, transfer_s=0.002, options={"trace_events": 60})
    metadata = read_trace(path)["streamflow"]
    assert metadata["num_dropped_events"] > 100
    report = report_on(path)
    assert 0 < len(report.walks) < NUM_WALKS


async def test_requests_that_walk_together_share_the_time_of_their_walk(path: Path) -> None:
    await run_model(path, compute_s=0.005, transfer_s=0.02, num_requests=3)
    report = report_on(path)
    assert report.bound_by == "transfer"
    assert max(walk.num_passes for walk in report.walks) > 1
    whole = report.sum_of("seconds")
    assert sum(report.by_cause().values()) < whole
    assert report.sum_of("streamed_bytes") < 3 * NUM_WALKS * NUM_BLOCKS * NBYTES * 0.9
