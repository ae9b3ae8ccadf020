"""``streamflow bench throughput``: what sharing walks is worth, on a modelled link and one compute unit."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
import torch
from click.testing import CliRunner

from streamflow.tools.bench.throughput import Effort, Rate, measure, open_modelled, ratios
from streamflow.tools.bench.traffic import Generation, Traffic
from streamflow.tools.cli import main


@pytest.mark.slow
def test_four_together_reach_what_the_resident_model_reaches_and_one_at_a_time_does_not() -> None:
    opened = open_modelled((4,), block_s=0.03, num_blocks=4, transfer_to_compute=2.5)
    report = anyio.run(measure, opened, Effort(forwards_per_lane=4, limit_s=60.0))
    assert all(rate["equal"] for rate in report["rates"])
    assert report["ratios"]["4 requests: streamed, together, to resident"] >= 0.9
    assert report["ratios"]["4 requests: streamed, one by one, to resident"] <= 0.45


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


def test_a_rate_leaves_out_the_beginning_and_a_wrong_output_is_told() -> None:
    traffic = Traffic(num_warm=2, num_counted=3)
    generation = Generation("one", 5, torch.ones(3))
    assert not traffic.is_over
    traffic.generate(lambda x: x * 0.5, generation)
    assert traffic.is_over
    assert traffic.forwards_per_s > 0
    traffic.generate(lambda x: x * 0.25, generation)
    assert len(traffic.digests["one"]) == 2
