"""Two ranks on two GPUs of one host, over NCCL: a wave of two pictures, and a rank that is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.joint_rank import RANK_DEADLINE_S, STEPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.xdist_group("two gpus"),
]
PATIENCE_S = 50


class Ranks:
    """The processes of a test, which read what each one tells."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def read(self, rank: int, field: str) -> dict[str, Any]:
        """The next line of ``rank`` that has ``field``."""
        stream = self.processes[rank].stdout
        assert stream is not None
        for line in stream:
            values: dict[str, Any] = json.loads(line)
            if field in values:
                return values
        raise AssertionError(f"rank {rank} ended without {field}: status {self.processes[rank].wait()}")


@contextmanager
def two_ranks(what: str, folder: Path) -> Iterator[Ranks]:
    """Two ranks that do ``what``; `timeout` ends each that stays too long."""
    command = ["timeout", "-k", "1", str(PATIENCE_S), sys.executable, "-m", "tests.gpu.joint_rank"]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(folder / "store"), what], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        yield Ranks(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_two_pictures_in_one_wave_are_each_what_the_resident_model_makes(tmp_path: Path) -> None:
    with two_ranks("wave", tmp_path) as ranks:
        found = [ranks.read(rank, "equal") for rank in range(2)]
        assert [process.wait(PATIENCE_S) for process in ranks.processes] == [0, 0]
    assert all(reading["equal"] for reading in found)
    assert found[0]["digest"] != found[1]["digest"]
    assert {reading["transfer"] for reading in found} == {"gathered"}
    assert {reading["num_walks"] for reading in found} == {STEPS}
    assert all(reading["streamed_bytes"] > 0 for reading in found)
    assert all(reading["peak_bytes"] < reading["model_bytes"] for reading in found)


def test_a_rank_that_is_killed_is_named_within_the_deadline_and_the_other_closes(tmp_path: Path) -> None:
    with two_ranks("killed", tmp_path) as ranks:
        for rank in range(2):
            ranks.read(rank, "step")
        killed_at = time.time()
        # the process itself, not the `timeout` around it
        child = subprocess.run(
            ["pgrep", "-P", str(ranks.processes[1].pid)], check=True, capture_output=True, text=True
        ).stdout
        os.kill(int(child), signal.SIGKILL)
        told = ranks.read(0, "error")
        closed = ranks.read(0, "closed_at")
        status = ranks.processes[0].wait(PATIENCE_S)
    assert told["rank"] == 1, told
    assert told["state"] == "broken"
    assert told["at"] - killed_at < RANK_DEADLINE_S
    assert closed["closed_at"] - killed_at < 3 * RANK_DEADLINE_S
    assert status == 0
