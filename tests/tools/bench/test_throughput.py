"""``streamflow bench throughput``: what sharing walks is worth, on a modelled link and one compute unit."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
import torch
from click.testing import CliRunner

from streamflow.tools.bench.throughput import Effort, Rate, measure, open_flux_shaped, open_modelled, ratios
from streamflow.tools.bench.traffic import Generation, Lane, Traffic
from streamflow.tools.cli import main


@pytest.mark.slow
def test_four_together_share_walks_and_gain_by_it() -> None:
    """By how much is the benchmark's own question: a busy machine answers it otherwise."""
    opened = open_modelled((4,), block_s=0.03, num_blocks=4, transfer_to_compute=2.5)
    report = anyio.run(measure, opened, Effort(forwards_per_lane=4, limit_s=60.0))
    assert all(rate["equal"] for rate in report["rates"])
    together, alone = (
        report["ratios"][f"4 requests: streamed, {way}, to resident"] for way in ("together", "one by one")
    )
    assert together > 1.5 * alone


def test_the_command_prints_every_rate_as_json() -> None:
    arguments = ["bench", "throughput", "--device", "cpu", "--concurrency", "1", "--forwards", "2", "--json"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    report: dict[str, Any] = json.loads(done.output)
    assert done.exit_code == 0
    assert next(iter(report)) == "benchmark"
    assert list(report)[1] == "ratios"
    assert [rate["mode"] for rate in report["rates"]] == ["resident, one by one", "streamed, one by one"]
    assert all(rate["equal"] and rate["forwards_per_s"] > 0 for rate in report["rates"])


def test_what_takes_too_long_is_told_and_the_rest_is_measured() -> None:
    opened = open_modelled((1,), block_s=0.02, num_blocks=4, transfer_to_compute=50.0)
    report = anyio.run(measure, opened, Effort(forwards_per_lane=2, limit_s=1.0))
    resident, streamed = report["rates"]
    assert resident["problem"] is None
    assert (streamed["problem"], streamed["forwards_per_s"]) == ("not done within 1 s", None)
    assert report["ratios"] == {}


def test_ratios_are_to_the_better_resident_rate() -> None:
    rates = [
        Rate("2", "resident, one by one", 1, 4.0, True),
        Rate("2", "resident, threads", 2, 5.0, True),
        Rate("2", "streamed, together", 2, 4.0, True, passes_per_walk=2.0, to_link_limit=1.02),
    ]
    assert ratios(rates) == {
        "2: streamed, together, to resident": 0.8,
        "2: streamed, together, walk to link limit": 1.02,
    }


def test_a_lane_ends_after_its_forwards_and_a_wrong_output_is_told() -> None:
    traffic = Traffic(num_lanes=1, forwards_per_lane=7, limit_s=1.0)
    generation = Generation("one", 4, torch.ones(3))
    lane = Lane([generation])
    traffic.generate(lambda x: x * 0.5, lane, generation)
    assert not traffic.is_over(lane)
    traffic.generate(lambda x: x * 0.25, lane, generation)
    assert traffic.is_over(lane)
    assert traffic.forwards_per_s > 0
    assert len(traffic.digests["one"]) == 2
    traffic.generate(lambda x: x, lane, generation)
    assert lane.num_forwards == 8


@pytest.mark.slow
def test_the_flux_shaped_case_of_mixed_sizes_runs_through() -> None:
    opened = open_flux_shaped((1,), 64, (64, 80), "cpu")
    report = anyio.run(measure, opened, Effort(forwards_per_lane=2, limit_s=60.0))
    assert [rate["problem"] for rate in report["rates"]] == [None] * 6
    assert {rate["case"] for rate in report["rates"]} == {"1 x 64 px", "64 + 80 px"}
