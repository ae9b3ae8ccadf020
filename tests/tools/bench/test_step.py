"""``streamflow bench step``: every source and transfer is measured, compared and exact."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from streamflow.tools.bench import step
from streamflow.tools.bench.flux_shaped import FluxShape
from streamflow.tools.bench.saved_report import SavedReport
from streamflow.tools.bench.time_limit import TimeLimit
from streamflow.tools.cli import main

TINY = FluxShape(width=32, num_heads=2, num_double=2, num_single=2, text_width=8, in_channels=4)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "SMALL", TINY)


def test_every_source_is_streamed_exactly(tmp_path: Path) -> None:
    sources = [argument for name in ("module", "checkpoint", "store") for argument in ("--source", name)]
    options = ["--device", "cpu", "--px", "64", "--rounds", "1", "--transfer", "direct", "--folder", str(tmp_path)]
    result = CliRunner().invoke(main, ["bench", "step", *options, *sources, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    readings = report["readings"]
    assert [reading["source"] for reading in readings] == ["module", "checkpoint", "artifact"]
    assert {reading["transfer"] for reading in readings} == {"direct"}
    assert all(reading["equal"] for reading in readings)
    assert len({reading["digest"] for reading in readings}) == 1
    assert report["peers"] == []
    assert str(tmp_path) not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_people_get_each_reading_at_once_and_a_table_with_ratios_first() -> None:
    options = ["--device", "cpu", "--px", "64", "--rounds", "1", "--transfer", "staged"]
    result = CliRunner().invoke(main, ["bench", "step", *options])
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"staged from module, \d+ x 8 MiB 64 px, [\d.]+x, [\d.]+x, [\d.]+ ms\n", result.stderr)
    text = " ".join(result.stdout.split())
    assert "x link limit x resident step resident" in text
    assert "staged from module, " in text


def test_threads_and_chunks_of_the_staged_transfer_are_swept_in_one_run(tmp_path: Path) -> None:
    sweep = ["--packing-threads", "1", "--packing-threads", "2", "--chunk-mib", "1", "--chunk-mib", "3"]
    result = run_saved(tmp_path / "report.json", *sweep)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    found = [(reading["packing_threads"], reading["staging_chunk_bytes"]) for reading in report["readings"]]
    assert found == [(None, None), (1, 1 << 20), (1, 3 << 20), (2, 1 << 20), (2, 3 << 20)]
    assert report == json.loads(result.stdout)
    assert report["left_out"] == []


def run_saved(output: Path, *options: str) -> Result:
    fixed = ["--device", "cpu", "--px", "64", "--rounds", "1", "--json", "--output", str(output)]
    return CliRunner().invoke(main, ["bench", "step", *fixed, *options])


def test_the_file_is_whole_after_each_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, saved = tmp_path / "report.json", []

    class Noted(SavedReport):
        def add(self, name: str, value: Any) -> None:
            super().add(name, value)
            saved.append(json.loads(output.read_text()))
            if len(saved) == 2:
                raise OSError("killed")

    monkeypatch.setattr(step, "SavedReport", Noted)
    result = run_saved(output, "--packing-threads", "1", "--packing-threads", "2")
    assert isinstance(result.exception, OSError)
    assert [len(report["readings"]) for report in saved] == [1, 2]
    assert saved[0]["readings"][0] == saved[1]["readings"][0]
    assert json.loads(output.read_text()) == saved[1]
    assert os.listdir(tmp_path) == ["report.json"]


def test_what_does_not_begin_in_time_is_named(tmp_path: Path) -> None:
    result = run_saved(tmp_path / "report.json", "--limit", "0", "--peers")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["readings"], report["peers"]) == ([], [])
    assert report["left_out"] == ["direct from module, 64 px", "staged from module, 8 MiB, 64 px"]
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_a_limit_counts_from_its_making_and_leaves_out_what_comes_after() -> None:
    now = [100.0]
    limit = TimeLimit(10.0, clock=lambda: now[0])
    assert (limit.left_s, limit.is_before("first")) == (10.0, True)
    now[0] = 110.0
    assert (limit.left_s, limit.is_before("second"), limit.is_before("third")) == (0.0, False, False)
    assert limit.left_out == ["second", "third"]
    assert TimeLimit(None).is_before("anything")
