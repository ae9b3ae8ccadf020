"""``streamflow bench chunk``: cold caches cost more, and every chunk is counted once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from streamflow.tools.bench import chunk_cost
from streamflow.tools.cli import main


def test_chunks_with_warm_and_cold_caches_are_told_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cost, "CACHE_BYTES", 64 << 20)
    emptied: list[int] = []
    original = chunk_cost.ctypes.memset
    monkeypatch.setattr(chunk_cost.ctypes, "memset", lambda *args: emptied.append(args[2]) or original(*args))
    done = CliRunner().invoke(main, ["bench", "chunk", "--device", "cpu", "--chunks", "40", "--json"])
    assert done.exit_code == 0, done.output
    reading: dict[str, Any] = json.loads(done.stdout)["reading"]
    assert (reading["num_chunks"], reading["is_copied"]) == (40, False)
    assert emptied == [64 << 20] * 40
    assert 0 < reading["warm_us"] < reading["cold_us"]


def test_people_are_told_what_is_in_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cost, "CACHE_BYTES", 0)
    done = CliRunner().invoke(main, ["bench", "chunk", "--device", "cpu", "--chunks", "3"])
    assert done.exit_code == 0, done.output
    assert "caches cold" in done.stdout
    assert "not counted: this device is the host" in done.stdout
