"""Ranks that are processes: what their shared copy costs each of them, and that it goes when they go, however."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.streamflow.ranks.kit import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.xdist_group("processes that share")]

MIB = 1 << 20
MODEL_BYTES = 64 * MIB
#: The window (2 MiB), and what threads and the interpreter take more or less from one reading to the next.
NOISE_BYTES = 5 * MIB

Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def told() -> Told:
    """What the ranks of every scenario have told."""
    command = [sys.executable, "-m", "tests.streamflow.ranks.processes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    found: Told = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_takes_its_part_of_one_copy_and_nothing_of_its_own(told: Told, size: int) -> None:
    scenario = told[f"{size} share"]
    assert scenario["codes"] == [0] * size
    for rank in scenario["told"]:
        before = rank["readings"].pop("before")
        more = {when: {kind: now[kind] - before[kind] for kind in now} for when, now in rank["readings"].items()}
        for kind in ("Pss", "Private_Dirty"):
            assert more["loaded"][kind] == pytest.approx(MODEL_BYTES, abs=NOISE_BYTES)
        for when in ("open", "closed"):
            assert more[when]["Pss"] == pytest.approx(MODEL_BYTES / size, abs=NOISE_BYTES)
            assert more[when]["Private_Dirty"] < NOISE_BYTES
        assert (rank["is_right"], rank["left"]) == ([True, True], [])


def test_a_rank_with_other_weights_is_named_on_all(told: Told) -> None:
    expected = {"found": [3, "blocks.7", "blocks.7.weight"], "is_right": True, "left": []}
    assert told["4 differ"] == {"told": [expected] * 4, "codes": [0] * 4}


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_is_killed_leaves_nothing_and_the_others_their_weights(told: Told, step: str, number: int) -> None:
    scenario = told[f"{number} is killed at {step}"]
    for rank in range(3):
        survivor = {"gone": number, "is_right": True, "left": []}
        assert scenario["told"][rank] == (None if rank == number else survivor)
        assert scenario["codes"][rank] == (-9 if rank == number else 0)


def test_forked_children_read_the_weights_and_change_their_own_and_programs_get_nothing(told: Told) -> None:
    expected = {"started": False, "code": 0, "is_right": True, "left": []}
    assert told["2 fork"] == {"told": [expected] * 2, "codes": [0] * 2}
