"""A real SIGINT, wherever it comes: KeyboardInterrupt reaches the program, and what follows is exact and clean."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.streamflow.runtime import interrupted_loop, interrupted_plain

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = {
    "plain": ("interrupted_plain", "main()"),
    "asyncio": ("interrupted_loop", "main('asyncio')"),
    "trio": ("interrupted_loop", "main('trio')"),
}
CASES = [
    *(("plain", scenario.__name__) for scenario in interrupted_plain.SCENARIOS),
    *((loop, scenario.__name__) for loop in interrupted_loop.RUNS for scenario in interrupted_loop.SCENARIOS),
]


@functools.cache
def run_program(kind: str) -> subprocess.CompletedProcess[str]:
    """Run all scenarios of a kind in a process of their own, where interrupts belong to them."""
    module, call = PROGRAMS[kind]
    # at the end: the package under test is the installed one
    code = f"import sys; sys.path.append({str(ROOT)!r}); from tests.streamflow.runtime import {module} as m; m.{call}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_program_ends_well(kind: str) -> None:
    ended = run_program(kind)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not ended.stderr


@pytest.mark.parametrize(("kind", "scenario"), CASES)
def test_interrupted(kind: str, scenario: str) -> None:
    ended = run_program(kind)
    outcomes = dict(line.split(" ", 1) for line in ended.stdout.splitlines())
    assert outcomes.get(scenario) == "ok", outcomes.get(scenario, ended.stderr)
