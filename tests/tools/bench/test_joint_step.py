"""``streamflow bench step --ranks``: ranks with pictures of their own, gathered and not, each exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from streamflow.tools.bench import joint_step
from streamflow.tools.bench.flux_shaped import FluxShape
from streamflow.tools.cli import main

TINY = FluxShape(width=32, num_heads=2, num_double=2, num_single=2, text_width=8, in_channels=4)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_step, "SMALL", TINY)


def run(*options: str) -> Result:
    return CliRunner().invoke(main, ["bench", "step", "--ranks", "2", "--device", "cpu", "--px", "64", *options])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["module", "store"])
def test_ranks_are_exact_and_walk_once_a_step(source: str, tmp_path: Path) -> None:
    result = run("--rounds", "1", "--source", source, "--folder", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["problem"] is None
    whole, gathered = report["readings"]
    assert (whole["chunk_bytes"], gathered["chunk_bytes"]) == (None, 1 << 20)
    assert whole["transfer"] != "gathered"
    assert gathered["transfer"] == "gathered"
    assert gathered["num_walks_per_step"] == 1
    assert all(reading["equal"] for reading in report["readings"])
    assert len(set(report["digests"])) == 2  # each its own picture
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_that_take_too_long_are_ended_and_said() -> None:
    result = run("--limit", "0.5")
    assert result.exit_code == 1
    assert "not done: rank 0: it was not done after 0.5 s" in " ".join(result.stdout.split())


@pytest.mark.parametrize("options", [["--source", "checkpoint"], ["--source", "module", "--source", "store"]])
def test_what_ranks_cannot_measure_is_refused(options: list[str]) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert "with --ranks there is one --px and one --source" in " ".join(result.stderr.split())
