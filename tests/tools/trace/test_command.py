"""The trace programs: what they print, what they draw, and what they refuse."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import streamflow
from streamflow.tools.bench.sleeping import SleepingModel
from streamflow.tools.cli import main
from streamflow.trace.file import read_json, write_json
from streamflow.trace.schema import problems_of
from tests.tools.trace.constructed import slow_rank

LATE = slow_rank(num_blocks=4, waits_for=3)
GOOD = slow_rank(num_blocks=4, waits_for=None)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def result_of(*arguments: object) -> Any:
    """What the program prints as JSON."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def late(tmp_path: Path) -> Path:
    path = tmp_path / "late.json"
    write_json(path, LATE)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.json.gz"
    write_json(path, {**GOOD, "streamflow": {**GOOD["streamflow"], "config": {"window_blocks": 3}}})
    return path


def test_a_report_says_what_holds_compute_up(late: Path) -> None:
    text = run("report", late).stdout
    assert "Model: bound by gathers (another rank late)" in text
    assert "Gathers waited 90.0 ms for rank 3" in text
    assert "look at rank 3" in text
    (component,) = result_of("report", late)["components"]
    assert component["bound_by"] == "gather"
    assert component["seconds_by_cause"]["gather"] == pytest.approx(0.09)
    assert component["advice"][0]["share"] == pytest.approx(0.5)
    assert component["seconds"] == pytest.approx(0.18)
    assert component["best_s"] == pytest.approx(4 * 0.02)


def test_a_report_tells_of_failures_and_of_what_was_dropped(tmp_path: Path) -> None:
    trace = copy.deepcopy(LATE)
    trace["streamflow"]["num_dropped_events"] = 5000
    trace["traceEvents"].append(
        {
            **next(event for event in trace["traceEvents"] if event["ph"] == "i"),
            "name": "EngineFailed",
            "args": {"fetch": None, "rung_us": None, "error": "OSError('gone')"},
        }
    )
    write_json(tmp_path / "trace.json", trace)
    text = run("report", tmp_path / "trace.json").stdout
    assert "OSError('gone')" in text
    assert "5,000 oldest events are not in the trace; trace_events=6,000 would have kept them" in text


def test_a_trace_in_which_nothing_ran_is_no_error(tmp_path: Path) -> None:
    trace = {**LATE, "traceEvents": []}
    write_json(tmp_path / "trace.json", trace)
    assert "no block ran" in run("report", tmp_path / "trace.json").stdout
    assert result_of("report", tmp_path / "trace.json")["components"][0]["bound_by"] == "compute"
    assert run("plot", tmp_path / "trace.json").exit_code == 0


class _Page(HTMLParser):
    """What a page refers to, and the data in it."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.data = ""
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        self._in_data = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._in_data else ""


def test_a_page_needs_nothing_else_and_has_every_span(late: Path) -> None:
    written = result_of("plot", late)
    assert written == {"html": str(late.with_suffix(".html")), "png": str(late.with_suffix(".png"))}
    text = Path(written["html"]).read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert page.references == []
    assert not re.search(r"https?://|@import|url\(", text)
    data = json.loads(page.data)
    bars = [bar for track in data["tracks"] for lane in track.get("lanes", ()) for bar in lane]
    assert len(bars) == sum(event["ph"] == "X" for event in LATE["traceEvents"])
    for track in data["tracks"]:
        for lane in track.get("lanes", ()):
            assert all(one["t"] + one["d"] <= other["t"] + 0.2 for one, other in itertools.pairwise(lane))
    assert data["components"][0]["text"].startswith("bound by gathers (another rank late)")


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    trace = copy.deepcopy(LATE)
    trace["traceEvents"][-1]["name"] = "</script><script>alert(1)</script>"
    write_json(tmp_path / "trace.json", trace)
    page = _Page()
    page.feed(Path(result_of("plot", tmp_path / "trace.json")["html"]).read_text(encoding="utf-8"))
    assert "</script><script>alert(1)</script>" in json.dumps(json.loads(page.data))


def test_a_picture_shows_the_tracks(late: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.png", tmp_path / "part.png"
    assert run("plot", late, "--png", whole).exit_code == 0
    assert run("plot", late, "--png", part, "--between", 0.0, 0.05).exit_code == 0
    with Image.open(whole) as picture, Image.open(part) as other:
        assert picture.size[0] > 1000
        assert picture.tobytes() != other.tobytes()
        colours = picture.convert("RGB").getcolors(1 << 20)
        assert colours is not None
        found = {colour for _, colour in colours}
    assert {(0x3B, 0x6F, 0xD4), (0x2A, 0x9D, 0x6F), (0xC2, 0x45, 0x9A)} <= found  # blocks, copies, gathers


def test_without_the_plotting_library_there_is_the_page(late: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("plot", late)
    assert (result.exit_code, result.stdout) == (0, f"{late.with_suffix('.html')}\n")
    assert "streamflow-offload[plot]" in result.stderr
    assert run("plot", late, "--png", late.with_suffix(".png")).exit_code == 2


def test_a_diff_ranks_what_changed(late: Path, good: Path) -> None:
    difference = result_of("diff", late, good)
    (component,) = difference["components"]
    assert component["walk_before_s"] - component["walk_after_s"] == pytest.approx(0.09)
    first = component["changes"][0]
    assert (first["what"], first["delta_s"]) == ("gathers (another rank late)", pytest.approx(-0.09))
    sizes = [abs(change["delta_s"]) for change in component["changes"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(change["delta_s"] for change in component["changes"]) == pytest.approx(-0.09)
    assert difference["settings"] == [{"what": "config.window_blocks", "before": 2, "after": 3}]
    text = run("diff", late, good).stdout
    assert "Model: a walk 180.0 ms -> 90.0 ms (-50.0%)" in text
    assert "bound by gathers (another rank late) before, by transfer (link busy) after" in text


def test_a_diff_of_a_trace_and_itself_is_empty(late: Path) -> None:
    difference = result_of("diff", late, late)
    assert (difference["components"][0]["changes"], difference["settings"]) == ([], [])


def test_a_trace_and_the_profilers_are_on_one_axis(tmp_path: Path) -> None:
    """A block that the profiler sees, too, is at the same time in both."""
    model, ours, theirs = SleepingModel(3, 1024, 0.02), tmp_path / "ours.json", tmp_path / "theirs.json"
    names = {f"block {index}": block for index, block in enumerate(model.blocks)}

    def named(name: str, block: Any) -> None:
        forward = block.forward

        def recorded(x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function(name):
                return forward(x)  # type: ignore[no-any-return]

        block.forward = recorded

    for name, block in names.items():
        named(name, block)
    profiling = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiling as profile, streamflow.offload(model, {"device": "cpu", "trace_path": ours}), torch.no_grad():
        model(torch.zeros(1))
    profile.export_chrome_trace(str(theirs))
    both_path = tmp_path / "both.json"
    assert result_of("merge", ours, theirs, "--out", both_path)["num_events"] > 20
    both = read_json(both_path)
    assert problems_of(both) == []
    events = [event for event in both["traceEvents"] if event.get("ph") == "X"]
    ran = {f"block {e['args']['block']}": e for e in events if e["cat"] == "block"}
    seen = {e["name"]: e for e in events if e["name"] in names and e["cat"] != "block"}
    assert set(ran) == set(seen) == set(names)
    for name in names:
        assert ran[name]["ts"] - 3000 < seen[name]["ts"] < ran[name]["ts"] + ran[name]["dur"]
        assert seen[name]["ts"] + seen[name]["dur"] < ran[name]["ts"] + ran[name]["dur"] + 3000


def test_what_is_no_profile_is_refused(late: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "events.json", {"traceEvents": []})
    result = run("merge", late, tmp_path / "events.json", "--out", tmp_path / "both.json")
    assert (result.exit_code, "export_chrome_trace" in result.stderr) == (2, True)
    assert not (tmp_path / "both.json").exists()


def test_traces_of_no_ranks_are_refused(late: Path, good: Path, tmp_path: Path) -> None:
    result = run("merge", late, good, "--out", tmp_path / "both.json")
    assert (result.exit_code, "no ranks gathered" in result.stderr) == (2, True)
    assert not (tmp_path / "both.json").exists()


@pytest.mark.parametrize("program", [["report"], ["plot"], ["diff", "{good}"], ["merge", "{good}", "--out", "x"]])
def test_what_is_no_trace_is_refused_by_each_program(program: list[str], good: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"traceEvents": []}')
    result = run(program[0], path, *(part.format(good=good) for part in program[1:]))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no trace that streamflow wrote" in result.stderr


def test_reading_needs_no_torch() -> None:
    code = "import sys, streamflow.tools.trace.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
