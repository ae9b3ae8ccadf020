"""``streamflow bench startup``: each start streams, gives the same picture, and is told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from streamflow.tools.bench import startup
from streamflow.tools.bench.children import ChildAnswer
from streamflow.tools.bench.flux_shaped import FluxShape
from streamflow.tools.bench.startup_worker import Start, start
from streamflow.tools.cli import main

TINY = FluxShape(width=32, num_heads=2, num_double=2, num_single=2, text_width=8, in_channels=4)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Children are played in this process; what they were asked."""
    asked: list[dict[str, Any]] = []

    async def ask(module: str, question: dict[str, Any], timeout_s: float) -> ChildAnswer:
        assert module == startup.WORKER
        asked.append(question)
        return ChildAnswer(json.loads(json.dumps(await start(Start(**question)))), None)

    monkeypatch.setattr(startup, "ask_child", ask)
    monkeypatch.setattr(startup, "SMALL", TINY)
    return asked


def test_every_way_to_start_gives_the_same_picture(in_process: list[dict[str, Any]], tmp_path: Path) -> None:
    arguments = ["bench", "startup", "--device", "cpu", "--px", "64", "--folder", str(tmp_path), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    report = json.loads(result.stdout)
    by_way = {reading["way"]: reading for reading in report["readings"]}
    assert list(by_way) == list(startup.WAYS)
    assert [reading["source"] for reading in by_way.values()] == ["checkpoint"] * 2 + ["artifact"] * 3
    assert [reading["store"] for reading in by_way.values()] == [None, None, "published", "local_hit", "local_hit"]
    assert len({reading["digest"] for reading in by_way.values()}) == 1
    for reading in by_way.values():
        assert 0 < reading["open_s"] < reading["to_first_step_s"]
    assert len(in_process) == len(startup.WAYS)
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_is_a_row_and_a_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def ask(module: str, question: dict[str, Any], timeout_s: float) -> ChildAnswer:
        return ChildAnswer(None, "it was not done after 1 s")

    monkeypatch.setattr(startup, "ask_child", ask)
    monkeypatch.setattr(startup, "SMALL", TINY)
    result = CliRunner().invoke(main, ["bench", "startup", "--device", "cpu", "--folder", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout.count("it was not done after 1 s") == len(startup.WAYS)


@pytest.mark.slow
def test_the_worker_is_a_program(tmp_path: Path) -> None:
    async def one() -> ChildAnswer:
        made = tmp_path / "checkpoint"
        await anyio.to_thread.run_sync(startup._save, TINY, "float32", startup.torch.device("cpu"), made)
        question = {
            "checkpoint": str(made),
            "shape": {"width": 32, "num_heads": 2, "num_double": 2, "num_single": 2, "text_width": 8, "in_channels": 4},
            "dtype": "float32",
            "image_px": 64,
            "num_text": 4,
            "options": {"device": "cpu"},
        }
        return await startup.ask_child(startup.WORKER, question, 100.0)

    found = anyio.run(one)
    assert found.values is not None
    assert found.values["source"] == "checkpoint"
