"""Children of benchmarks: what they answer, and what becomes of those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from streamflow.tools.bench import children
from streamflow.tools.bench.children import ChildAnswer, ask_child

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Sets what a child does that runs the module ``scripted_child``."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "scripted_child.py").write_text


async def test_an_answer_comes_back_as_values(script: Callable[[str], object]) -> None:
    script("import json, sys\nprint(json.dumps({'asked': json.loads(sys.argv[1])}))")
    assert await ask_child("scripted_child", {"x": [1, 2]}, PATIENCE_S) == ChildAnswer({"asked": {"x": [1, 2]}}, None)


async def test_a_child_that_fails_says_so(script: Callable[[str], object]) -> None:
    script("raise SystemExit(3)")
    found = await ask_child("scripted_child", {}, PATIENCE_S)
    assert found == ChildAnswer(None, "it ended without an answer, with status 3")


async def test_a_child_that_hangs_is_killed(script: Callable[[str], object]) -> None:
    script("import time\ntime.sleep(1000)")
    assert await ask_child("scripted_child", {}, 0.5) == ChildAnswer(None, "it was not done after 0.5 s")


def test_an_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    children.answer({"a": "x\ny"})
    assert capsys.readouterr().out == '{"a": "x\\ny"}\n'
