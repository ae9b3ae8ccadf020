"""What ranks that gather take of the host together: one copy of the weights, whoever loaded them."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from streamflow.host_weights.remapping import give_memory_back
from streamflow.ranks import shared_images
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.kit import sha256_of
from tests.streamflow.ranks.joint import Member, Outcome, backend_of, joined, opened, outcome_of
from tests.streamflow.ranks.processes import WIDTH, Matrices, values
from tests.streamflow.ranks.test_joint_sources import store_options

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes that share")]

MIB = 1 << 20
MODEL_BYTES = 64 * MIB
#: Two slots of a MiB, and what a busy interpreter, its threads and allocators take more or less.
NOISE_BYTES = 12 * MIB
RANKS = {"rank_deadline_s": 10.0, "gather_chunk_bytes": 64 * MIB}
WAVE = WaveSignature((("Matrices", 1),))

Reading = dict[str, int]


def reading() -> Reading:
    """Bytes of this process, once all is settled."""
    gc.collect()
    give_memory_back()
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    found = {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in lines}
    return {"pss": found["Pss"], "private": found["Private_Dirty"]}


@torch.no_grad()
def digest_of(model: Matrices, seed: int) -> str:
    return sha256_of(model(torch.randn(2, model.width, generator=torch.Generator().manual_seed(seed)) / 1e9))


@torch.no_grad()
def expected(seed: int) -> str:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)) / 1e9
    for number in range(64):
        x = x @ values(WIDTH, number)
    return sha256_of(x)


@asynccontextmanager
async def measured(
    rank: Rank, model: Matrices, changes: dict[str, Any], name: str
) -> AsyncIterator[tuple[Outcome, Reading]]:
    """The offload, open and used; what came of a request, and the reading while all ranks stand still."""
    async with opened(rank, model, **changes) as member:
        outcome = await outcome_of(member.offload.request(wave=WAVE).run(digest_of, model, rank.rank))
        yield outcome, await stand_still(member, name)


async def stand_still(member: Member, name: str) -> Reading:
    await member.meet(name)
    found = await anyio.to_thread.run_sync(reading)
    await member.meet(f"{name} read")
    return found


@pytest.mark.parametrize("with_store", [False, True], ids=["without the store", "with the store"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_one_copy_and_nothing_of_their_own(
    size: int, with_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_images, "PART_BYTES", 16 * MIB)  # as it is outside of tests
    changes: dict[str, Any] = {"max_running_requests": 1, "ranks": RANKS, "packing_threads": 2}
    changes |= store_options(tmp_path / "store") if with_store else {}

    async def main(rank: Rank) -> dict[str, Any]:
        async with measured(rank, Matrices(8), changes, "first"):  # what is needed once is there
            pass
        found = {"before": await anyio.to_thread.run_sync(reading)}
        model = Matrices(WIDTH)
        found["loaded"] = await anyio.to_thread.run_sync(reading)
        async with measured(rank, model, changes, "then") as (outcome, found["open"]):
            return {**found, "outcome": outcome}

    def work(rank: Rank) -> object:
        joined(rank)
        return anyio.run(main, rank, backend=backend_of(rank))

    answers = run_ranks(size, work, patience_s=80)
    assert [answer["outcome"].value for answer in answers] == [expected(rank) for rank in range(size)]
    more = [{kind: answer["open"][kind] - answer["before"][kind] for kind in answer["open"]} for answer in answers]
    for answer, rank in zip(answers, more, strict=True):
        assert answer["loaded"]["private"] - answer["before"]["private"] > MODEL_BYTES - NOISE_BYTES
        assert rank["private"] < NOISE_BYTES, more
        assert rank["pss"] < MODEL_BYTES / size + NOISE_BYTES, more
