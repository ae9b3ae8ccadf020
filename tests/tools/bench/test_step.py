"""``streamflow bench step``: every source and transfer is measured, compared and exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamflow.tools.bench import step
from streamflow.tools.bench.flux_shaped import FluxShape
from streamflow.tools.cli import main

TINY = FluxShape(width=32, num_heads=2, num_double=2, num_single=2, text_width=8, in_channels=4)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "SMALL", TINY)


def test_every_source_is_streamed_exactly(tmp_path: Path) -> None:
    sources = [argument for name in ("module", "checkpoint", "store") for argument in ("--source", name)]
    options = ["--device", "cpu", "--px", "64", "--rounds", "1", "--transfer", "direct", "--folder", str(tmp_path)]
    result = CliRunner().invoke(main, ["bench", "step", *options, *sources, "--json"])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    report = json.loads(result.stdout)
    readings = report["readings"]
    assert [reading["source"] for reading in readings] == ["module", "checkpoint", "artifact"]
    assert {reading["transfer"] for reading in readings} == {"direct"}
    assert all(reading["equal"] for reading in readings)
    assert len({reading["digest"] for reading in readings}) == 1
    assert report["peers"] == []
    assert str(tmp_path) not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_people_get_ratios_first(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--px", "64", "--rounds", "1", "--transfer", "staged"]
    result = CliRunner().invoke(main, ["bench", "step", *options])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    text = " ".join(result.stdout.split())
    assert "x link limit x resident step resident" in text
    assert "staged from module 64" in text
