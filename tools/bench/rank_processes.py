"""Ranks of a benchmark: torchrun's, or processes that it starts on this machine, and how they meet."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import torch.distributed as dist

from streamflow.tools.bench.children import ChildAnswer, ask_child


@attrs.frozen
class RankPlace:
    """Which rank this process is. ``store``: a file that the ranks meet at; None: as torchrun's environment has it."""

    rank: int
    size: int
    local_rank: int
    store: str | None = None

    @classmethod
    def of_torchrun(cls) -> RankPlace | None:
        """This process's place; None if torchrun did not start it."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return cls(rank, size, local_rank)


async def ask_ranks(benchmark: str, worker: str, question: Any, size: int, limit_s: float) -> dict[str, Any]:
    """The report of the first of ``size`` processes that run ``worker``, with what any of them met as its ``problem``.

    ``question`` is an attrs value, put to all of them. They are killed after ``limit_s``.
    """
    answers: dict[int, ChildAnswer] = {}

    async def ask(rank: int, store: Path) -> None:
        place = RankPlace(rank, size, local_rank=rank, store=str(store))
        asked = {"question": attrs.asdict(question), "place": attrs.asdict(place)}
        answers[rank] = await ask_child(worker, asked, limit_s)

    with tempfile.TemporaryDirectory(prefix="streamflow-bench-") as folder:
        async with anyio.create_task_group() as task_group:
            for rank in range(size):
                task_group.start_soon(partial(ask, rank, Path(folder) / "store"))
    problems = [f"rank {rank}: {a.problem}" for rank, a in sorted(answers.items()) if a.problem is not None]
    report = answers[0].values or {"benchmark": benchmark, "ranks": size, "readings": [], "problem": None}
    return {**report, "problem": "; ".join(problems) or report["problem"]}


def join_ranks(place: RankPlace, timeout_s: float) -> None:
    """Initialise torch.distributed, over gloo, for the rank in ``place``. Blocks."""
    # NVLink multicast needs what not every container may use; whoever wants it says so
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    meeting: dict[str, Any] = {}
    if place.store is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = {"init_method": f"file://{place.store}", "rank": place.rank, "world_size": place.size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **meeting)
