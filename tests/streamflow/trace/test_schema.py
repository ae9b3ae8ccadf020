"""The validator takes what is of the schema, and names what is not; the documentation has every field."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamflow.trace.errors import TraceFormatError
from streamflow.trace.file import read_json
from streamflow.trace.schema import ENGINE, INSTANT_ARGS, METADATA, RANKS, SCHEMA_VERSION, SPANS, problems_of
from tests.tools.trace.constructed import slow_rank

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "trace-schema.md"
Trace = dict[str, Any]


def first(trace: Trace, **wanted: Any) -> dict[str, Any]:
    return next(e for e in trace["traceEvents"] if all(e.get(key) == value for key, value in wanted.items()))


def flow(step: str) -> dict[str, Any]:
    where = {"pid": 10_000_000, "tid": 200, "ts": 1.0}
    return {"ph": step, "cat": "flow", "name": "fetch", "id": 3, **where}


CHANGES: dict[str, tuple[str, Callable[[Trace], object]]] = {
    "no events": ("no list traceEvents", lambda trace: trace.pop("traceEvents")),
    "no metadata": ("no trace that streamflow wrote", lambda trace: trace.pop("streamflow")),
    "a later version": ("version is 3", lambda trace: trace["streamflow"].update(schema_version=3)),
    "no clock": ("lacks clock", lambda trace: trace["streamflow"].pop("clock")),
    "a clock without a time": ("unix_ns_at_zero", lambda trace: trace["streamflow"]["clock"].clear()),
    "ranks without a number": ("lacks size", lambda trace: trace["streamflow"].update(ranks={"run": "a"})),
    "ranks that are none": ("ranks lacks run", lambda trace: trace["streamflow"].update(ranks=2)),
    "a gather without a number": ("lacks number", lambda trace: first(trace, cat="gather")["args"].pop("number")),
    "an engine without a name": ("lacks name", lambda trace: trace["streamflow"]["engines"][0].pop("name")),
    "an argument too few": ("lacks pass_id", lambda trace: first(trace, cat="block")["args"].pop("pass_id")),
    "an argument of another type": ("nbytes='1'", lambda trace: first(trace, cat="copy")["args"].update(nbytes="1")),
    "a truth for a number": ("block=True", lambda trace: first(trace, cat="copy")["args"].update(block=True)),
    "no duration": ("lacks dur", lambda trace: first(trace, cat="block").pop("dur")),
    "a negative duration": ("ends before it begins", lambda trace: first(trace, cat="block").update(dur=-1.0)),
    "an unknown category": ("none of this schema", lambda trace: first(trace, cat="block").update(cat="blocks")),
    "an overlap": ("overlaps", lambda trace: first(trace, cat="block").update(dur=55_000)),
    "a track without a name": ("has no name", lambda trace: first(trace, cat="block").update(tid=77)),
    "a flow without a beginning": ("has no beginning", lambda trace: trace["traceEvents"].append(flow("f"))),
    "a flow that begins twice": ("begins 2 times", lambda trace: trace["traceEvents"].extend([flow("s"), flow("s")])),
}


@pytest.fixture(scope="module")
def sound() -> Trace:
    return slow_rank(num_blocks=3, waits_for=1)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_of_the_schema_is_named(sound: Trace, change: str) -> None:
    trace = copy.deepcopy(sound)
    problem, make = CHANGES[change]
    make(trace)
    found = problems_of(trace)
    assert len(found) >= 1
    assert any(problem in each for each in found), found


def test_whom_a_gather_waited_for_need_not_be_known(sound: Trace) -> None:
    trace = copy.deepcopy(sound)
    trace["streamflow"]["ranks"] = {"size": 2, "run": "a"}
    first(trace, cat="gather")["args"].update(waited_us=None, last_rank=None)
    assert problems_of(trace) == []


def test_events_of_others_are_not_looked_at(sound: Trace) -> None:
    others = [{"ph": "X", "pid": 4321, "cat": "kernel"}, {"ph": "??"}]
    assert problems_of({**sound, "traceEvents": [*sound["traceEvents"], *others]}) == []


def test_a_span_inside_another_is_no_overlap(sound: Trace) -> None:
    trace = copy.deepcopy(sound)
    run = first(trace, cat="block")
    trace["traceEvents"].append({**run, "ts": run["ts"] + 1, "dur": run["dur"] - 2})
    assert problems_of(trace) == []


@pytest.mark.parametrize(("content", "problem"), [("{", "no JSON"), ("3", "no JSON object"), ("\x1f\x8b", "no JSON")])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(TraceFormatError, match=problem):
        read_json(path)


def test_the_documentation_has_every_field_and_no_other() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"version {SCHEMA_VERSION}" in text
    rows = {
        match[1]: set(re.findall(r"`(\w+)`", match[2]))
        for match in re.finditer(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", text, re.MULTILINE)
    }
    for category, arguments in SPANS.items():
        assert rows[category] == set(arguments), category
    assert rows["event"] == set(INSTANT_ARGS)
    for name in (*METADATA, *ENGINE, *RANKS):
        assert f"`{name}`" in text, name
