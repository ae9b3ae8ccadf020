"""A program that says what ranks with an offload open together take of the host: ``python -m``, number, store or "".

It forks them from a process that has done nothing else. In the one that runs the tests, what these left behind counts
for one or the other by turns: a page that a child shares with its parent becomes the child's own once the parent
writes to it. Prints JSON: per rank the digest it computed, and its bytes before, with its own weights, and while open.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.kit import sha256_of
from tests.streamflow.ranks.joint import Member, backend_of, joined, opened
from tests.streamflow.ranks.processes import WIDTH, Matrices, memory
from tests.streamflow.ranks.test_joint_sources import store_options

MIB = 1 << 20
RANKS = {"rank_deadline_s": 10.0, "gather_chunk_bytes": 64 * MIB}
WAVE = WaveSignature((("Matrices", 1),))

Reading = dict[str, int]


@torch.no_grad()
def digest_of(model: Matrices, seed: int) -> str:
    return sha256_of(model(asked(model.width, seed)))


def asked(width: int, seed: int) -> torch.Tensor:
    """What rank ``seed`` asks of the matrices."""
    return torch.randn(2, width, generator=torch.Generator().manual_seed(seed)) / 1e9


@asynccontextmanager
async def measured(
    rank: Rank, model: Matrices, changes: dict[str, Any], name: str
) -> AsyncIterator[tuple[str, Reading]]:
    """The offload, open and used: what a request made, and the reading while all ranks stand still."""
    async with opened(rank, model, **changes) as member:
        made = await member.offload.request(wave=WAVE).run(digest_of, model, rank.rank)
        yield made, await stand_still(member, name)


async def stand_still(member: Member, name: str) -> Reading:
    await member.meet(name)
    found = await anyio.to_thread.run_sync(memory)
    await member.meet(f"{name} read")
    return found


def measuring(store: str) -> Callable[[Rank], object]:
    """What a child does; ``store`` "": there is none."""
    changes: dict[str, Any] = {"max_running_requests": 1, "ranks": RANKS, "packing_threads": 2}
    changes |= store_options(Path(store)) if store else {}

    async def main(rank: Rank) -> dict[str, Any]:
        async with measured(rank, Matrices(8), changes, "first"):  # what is needed once is there
            pass
        found: dict[str, Any] = {"before": await anyio.to_thread.run_sync(memory)}
        model = Matrices(WIDTH)
        found["loaded"] = await anyio.to_thread.run_sync(memory)
        async with measured(rank, model, changes, "then") as (found["made"], found["open"]):
            return found

    def work(rank: Rank) -> object:
        joined(rank)
        return anyio.run(main, rank, backend=backend_of(rank))

    return work


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_ranks(int(sys.argv[1]), measuring(sys.argv[2]), patience_s=80)))
