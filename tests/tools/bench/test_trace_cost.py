"""``streamflow bench trace``: the cost of an event, and a trace that can be looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamflow.tools.bench import trace_cost
from streamflow.tools.cli import main

NUM_BLOCKS = 4


def test_the_cost_is_printed_and_the_trace_is_kept_for_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_cost, "NUM_BLOCKS", NUM_BLOCKS)
    monkeypatch.setattr(trace_cost, "BLOCK_S", 0.002)
    monkeypatch.setattr(trace_cost, "TRANSFER_S", 0.001)
    monkeypatch.setattr(trace_cost, "CAPACITY", 50)
    path = tmp_path / "trace.json"
    arguments = ["bench", "trace", "--device", "cpu", "--rounds", "2", "--keep", str(path), "--json"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    reading: dict[str, Any] = json.loads(done.stdout)["reading"]
    assert (reading["num_rounds"], reading["num_blocks"]) == (2, NUM_BLOCKS)
    assert 6 * NUM_BLOCKS <= reading["events_per_walk"] <= 12 * NUM_BLOCKS
    assert reading["event_us"] > 0
    report = CliRunner().invoke(main, ["trace", "report", str(path), "--json"], catch_exceptions=False)
    assert report.exit_code == 0
    assert json.loads(path.read_text())["streamflow"]["num_dropped_events"] > 0
    assert json.loads(report.stdout)
