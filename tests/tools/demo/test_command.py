"""``streamflow demo``: what it prints, what it writes, and when it does not succeed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from torch import Tensor

from streamflow.config import OffloadConfig
from streamflow.tools.cli import main
from streamflow.tools.demo import command, event_log, generation
from streamflow.tools.demo.sampling import sample
from streamflow.trace.file import read_json
from streamflow.trace.schema import problems_of

Run = Callable[..., Result]
FEW = ["--steps", "3", "--digits", "1"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["demo", "--device", "cpu", "--out", str(tmp_path / "out"), *arguments])

    return invoke


def report_of(result: Result) -> dict[str, Any]:
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


def test_streamed_and_resident_draw_the_same_bytes(run: Run) -> None:
    result = run("--json", "--window", "3", *FEW)
    assert (result.exit_code, result.stderr) == (0, "")
    report = report_of(result)
    statistics, engine = report["statistics"], report["statistics"]["engine"]
    assert report["equal"] is True
    assert report["problems"] == []
    assert report["resident_sha256"] == report["streamed_sha256"]
    assert len(report["resident_sha256"]) == 64
    assert report["num_digits"] == 10
    assert engine["num_passes"] == engine["num_walks"] == report["num_steps"] == 3
    # every block once for each step, and what was fetched ahead for the next
    assert statistics["block_bytes"] * 3 <= engine["streamed_bytes"] <= statistics["block_bytes"] * 4
    assert engine["device_peak_bytes"] == engine["window_bytes"] == statistics["block_bytes"] // 12 * 3
    assert engine["device_peak_bytes"] < 0.3 * statistics["model_bytes"]
    assert report["config"]["window_blocks"] == 3
    assert 0 <= report["waited_s"] <= report["streamed_s"]
    assert report["waited_share"] == report["waited_s"] / report["streamed_s"]
    assert report["num_threads"] == 1


def test_the_log_agrees_with_the_statistics(run: Run) -> None:
    report = report_of(run("--json", *FEW))
    engine = report["statistics"]["engine"]
    events = [json.loads(line) for line in Path(report["event_log"]).read_text(encoding="utf-8").splitlines()]
    kinds = Counter(event["kind"] for event in events)
    assert len(events) == report["num_events"]
    assert report["num_lost_events"] == 0
    assert kinds["FetchStarted"] == engine["num_fetches"]
    assert kinds["PassEnded"] == engine["num_passes"]
    assert sum(event["nbytes"] for event in events if event["kind"] == "FetchStarted") == engine["streamed_bytes"]


def test_the_picture_shows_a_row_for_each_class(run: Run) -> None:
    report = report_of(run("--json", "--steps", "2", "--digits", "2"))
    with Image.open(report["picture"]) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.height > 4 * picture.width
        darkest, lightest = picture.convert("L").getextrema()
    assert (report["num_digits"], report["digits_per_class"]) == (20, 2)
    assert lightest == 255
    assert darkest == 0


def test_a_seed_says_what_is_drawn(run: Run) -> None:
    digests = [report_of(run("--json", "--seed", seed, *FEW))["streamed_sha256"] for seed in ("1", "1", "2")]
    assert digests[0] == digests[1] != digests[2]


def test_the_digits_are_read_beside_real_ones(run: Run) -> None:
    reading = report_of(run("--json", "--steps", "10", "--digits", "1"))["reading"]
    assert reading["num_drawn"] == 10
    assert reading["num_drawn_right"] >= 8
    assert reading["num_real_right"] / reading["num_real"] > 0.95


def test_people_get_the_same_figures(run: Run) -> None:
    result = run(*FEW)
    assert (result.exit_code, result.stderr) == (0, "")
    for words in (
        "yes, byte for byte",
        "2.9 MB, 12 blocks",
        "465.4 kB on cpu, 16.2 % of the model; a window of 2 blocks",
        "3, for 3 passes",
        "direct from the module",
        "lost to waiting for blocks",
        "of 10 read as the class asked for",
        "digits.png",
        "events.jsonl",
    ):
        assert words in result.stdout
    assert "FAILED" not in result.stdout


def test_other_bytes_are_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def drifting(*args: Any, **kwargs: Any) -> Tensor:
        images = sample(*args, **kwargs)
        calls.append(images)
        if len(calls) == 3:  # after the warm-up and the resident run: one bit of the streamed one
            images.view(torch.int32)[3, 0, 4, 4] ^= 1
        return images

    monkeypatch.setattr(generation, "sample", drifting)
    result = run("--json", *FEW)
    report = report_of(result)
    assert len(calls) == 3
    assert result.exit_code == 1
    assert report["equal"] is False
    assert report["problems"] == ["the streamed model drew other bytes than the resident one"]
    calls.clear()
    result = run(*FEW)
    assert result.exit_code == 1
    assert "FAILED: the streamed model drew other bytes than the resident one" in result.stdout


def test_nothing_streamed_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "OffloadConfig", lambda **options: OffloadConfig(**options, resident_blocks="all"))
    result = run("--json", *FEW)
    assert result.exit_code == 1
    report = report_of(result)
    assert report["equal"] is True
    assert report["problems"] == ["nothing was streamed"]


def test_a_streamed_run_that_does_not_use_the_model_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []

    def cheating(*args: Any, **kwargs: Any) -> Tensor:
        if len(drawn) < 2:
            drawn.append(sample(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr(generation, "sample", cheating)
    result = run("--json", *FEW)
    assert result.exit_code == 1
    assert "0 passes were made for 3 steps" in report_of(result)["problems"]


def test_lost_events_are_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "CAPACITY_EVENTS", 1)
    monkeypatch.setattr(event_log, "LAST_EVENTS_S", 0.1)  # the end of a pass may be among the lost ones
    result = run("--json", *FEW)
    assert result.exit_code == 1
    (problem,) = report_of(result)["problems"]
    assert "events of the engine are not in " in problem


def test_without_the_classifier_the_rest_works(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.svm"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "streamflow.tools.demo.classifier", raising=False)
    result = run("--json", *FEW)
    assert result.exit_code == 0
    report = report_of(result)
    assert report["reading"] == (
        "sklearn is not installed, so nothing can read the digits; "
        "install it with `pip install 'streamflow-offload[demo]'`"
    )
    assert report["equal"] is True
    assert "streamflow-offload[demo]" in run(*FEW).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--window", "0"], "window_blocks is 0 but must be at least 1"),
        (["--device", "cuda:99"], "device cuda:99 is not there"),
        (["--device", "abacus"], "device 'abacus' is not a device that torch knows"),
        (["--steps", "0"], "num_steps is 0; it must be at least 1"),
        (["--digits", "0"], "Invalid value for '--digits'"),
        (["--windw", "2"], "No such option"),
        (["--out", "/dev/null/out"], "/dev/null/out: Not a directory"),
    ],
)
def test_a_wrong_option_is_one_clear_message(run: Run, arguments: list[str], words: str) -> None:
    result = run("--json", *FEW, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_torchs_threads_are_as_before(run: Run) -> None:
    assert report_of(run("--json", "--threads", "2", "--steps", "1", "--digits", "1"))["num_threads"] == 2
    assert torch.get_num_threads() == 1


@pytest.mark.gpu
def test_on_a_cuda_device(run: Run) -> None:
    result = run("--json", "--device", "cuda", *FEW)
    report = report_of(result)
    assert (result.exit_code, report["problems"]) == (0, [])
    statistics = report["statistics"]
    assert statistics["engine"]["streamed_bytes"] >= 3 * statistics["block_bytes"]
    assert statistics["engine"]["device_peak_bytes"] < 0.3 * statistics["model_bytes"]
    assert statistics["host_image_bytes"] == statistics["block_bytes"]


@pytest.mark.slow
def test_the_program_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamflow", "demo", "--json", "--device", "cpu", *FEW]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stderr) == (0, "")
    report = json.loads(run.stdout)
    assert report["equal"] is True
    assert report["statistics"]["engine"]["streamed_bytes"] > 0
    assert sorted(path.name for path in (tmp_path / "demo-out").iterdir()) == ["digits.png", "events.jsonl"]


def test_a_trace_is_written_if_asked_for(run: Run, tmp_path: Path) -> None:
    result = run("--steps", "2", "--digits", "1", "--trace", "--json")
    assert result.exit_code == 0, result.output
    trace = read_json(tmp_path / "out" / "trace.json")
    assert problems_of(trace) == []
    fetched = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "slot"]
    assert len(fetched) > 1
