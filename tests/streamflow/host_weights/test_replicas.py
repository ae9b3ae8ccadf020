"""Many processes that open one model through the store share one entry; a forked one is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamflow.store.reports import StoreOutcome
from tests.streamflow.host_weights.kit import Stored
from tests.streamflow.store.crash.kit import locked_files, unfinished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    found = Stored(tmp_path)
    found.save()
    return found


def program(what: str, stored: Stored) -> dict[str, Any]:
    """What the program of this name says."""
    command = [sys.executable, "-m", "tests.streamflow.host_weights.replicas", what, str(stored.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_eight_replicas_of_a_cold_model_publish_it_once_and_compute_the_same(stored: Stored) -> None:
    found = program("race", stored)
    assert found["codes"] == [0] * 8
    assert [told["outcome"] for told in found["told"]].count(StoreOutcome.PUBLISHED) == 1
    assert {told["generation"] for told in found["told"]} == {1}
    assert all(told["outputs"] == found["expected"] for told in found["told"])
    assert len({tuple(told["inodes"]) for told in found["told"]}) == 1
    assert found["told"][0]["inodes"] == [file.stat().st_ino for file in stored.weight_files]
    assert unfinished(stored.root) == []
    assert locked_files(stored.root) == []


def test_a_fork_of_a_process_that_streams_is_refused_and_does_no_harm(stored: Stored) -> None:
    found = program("fork", stored)
    assert (found["refusal"], found["code"]) == ("StoreForkedError", 0)
    assert len(found["held"]) == 1, "the child gave the parent's lease back"
    assert found["left"] == []
    assert found["outputs_right"]
