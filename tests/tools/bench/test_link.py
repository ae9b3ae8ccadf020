"""``streamflow bench link``: every kind of memory has its rate, and ratios are to the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamflow.tools.bench import link
from streamflow.tools.cli import main
from tests.streamflow.devices import RegisteringDevice


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["bench", "link", "--size-mib", "16", *arguments])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PACK_SECONDS", 0.05)


def rates(report: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(reading["what"], reading["source"]): reading["bytes_per_s"] for reading in report["readings"]}


def test_readings_of_a_host_device(tmp_path: Path) -> None:
    report = json.loads(run("--device", "cpu", "--folder", str(tmp_path), "--json"))
    found = rates(report)
    assert {("copy", "page-locked"), ("copy", "pageable"), ("pack", "file, 1 threads")} <= set(found)
    assert ("copy", "registered file") not in found
    assert report["registration"]["problem"] == "the device is the host"
    best = found["copy", "page-locked"]
    assert all(reading["ratio"] == reading["bytes_per_s"] / best > 0 for reading in report["readings"])
    assert list(tmp_path.iterdir()) == []


def test_a_registered_file_is_measured_where_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RegisteringDevice()
    monkeypatch.setattr(link, "make_device", lambda config: device)
    monkeypatch.setattr(link, "_private_rates", lambda device, stream, nbytes: iter([("page-locked", 1e9)]))
    text = " ".join(run("--device", "cpu").split())
    assert "copy registered file" in text
    assert "registered 16,781,312 bytes in" in text
    assert device.script.registered == {}
