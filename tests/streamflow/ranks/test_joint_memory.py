"""What ranks that gather take of the host together: one copy of the weights, whoever loaded them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.streamflow.kit import sha256_of
from tests.streamflow.ranks.joint_memory import asked
from tests.streamflow.ranks.processes import WIDTH, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110), pytest.mark.xdist_group("processes that share")]

MIB = 1 << 20
MODEL_BYTES = 64 * MIB
#: Two slots of a MiB, and what a busy interpreter, its threads and allocators take more or less.
NOISE_BYTES = 12 * MIB


@torch.no_grad()
def expected(seed: int) -> str:
    x = asked(WIDTH, seed)
    for number in range(64):
        x = x @ values(WIDTH, number)
    return sha256_of(x)


@pytest.mark.parametrize("with_store", [False, True], ids=["without the store", "with the store"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_one_copy_and_nothing_of_their_own(size: int, with_store: bool, tmp_path: Path) -> None:
    store = str(tmp_path / "store") if with_store else ""
    command = [sys.executable, "-m", "tests.streamflow.ranks.joint_memory", str(size), store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [rank["made"] for rank in told] == [expected(rank) for rank in range(size)]
    more = [{kind: rank["open"][kind] - rank["before"][kind] for kind in rank["open"]} for rank in told]
    for rank, taken in zip(told, more, strict=True):
        assert rank["loaded"]["Private_Dirty"] - rank["before"]["Private_Dirty"] > MODEL_BYTES - NOISE_BYTES
        assert taken["Private_Dirty"] < NOISE_BYTES, more
        assert taken["Pss"] < (0 if with_store else MODEL_BYTES / size) + NOISE_BYTES, more
