"""Killed ahead of any operation, or half through a write: a next start finds a sound entry or makes it again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "tests.streamflow.store.crash.killing"
#: What starts may find after a kill, and the fewest moments at which each scenario can be killed.
EXPECTED = {
    "cold": ({"rebuilt", "hit"}, 100),
    "rebuild": ({"rejected", "rebuilt", "hit"}, 80),
    "evict": ({"rebuilt", "hit"}, 25),
}


@pytest.mark.slow
@pytest.mark.timeout(400)  # many processes, on a machine that may be busy
@pytest.mark.parametrize("name", EXPECTED)
def test_a_start_after_a_kill_hits_a_verified_entry_or_rebuilds(name: str, tmp_path: Path) -> None:
    """The program checks each start: right bytes, nothing locked, nothing left in ``tmp/``, the next one a hit."""
    found = killed_everywhere(tmp_path, name)
    assert found["torch"] is False
    outcomes, fewest = EXPECTED[name]
    assert len(found["outcomes"]) >= fewest
    assert {outcome for _, _, outcome in found["outcomes"]} == outcomes
    kinds = Counter(operation for operation, _, _ in found["outcomes"])
    assert {"fsync", "rename", "mkdir", "flock", "fchmod"} <= set(kinds)
    if name != "evict":
        assert any(torn for _, torn, _ in found["outcomes"])
        assert found["outcomes"][-1 - num_torn(found)][2] == "hit", "the last operation follows the publication"


def num_torn(found: dict[str, Any]) -> int:
    return sum(torn for _, torn, _ in found["outcomes"])


def killed_everywhere(folder: Path, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", PROGRAM, str(folder), name, "asyncio", "trio"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_scenarios_have_more_than_200_points_together() -> None:
    assert sum(fewest for _, fewest in EXPECTED.values()) > 200
