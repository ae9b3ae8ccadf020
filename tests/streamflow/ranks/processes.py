"""Ranks in processes that agree through the coordinator, and a program that says what their shared copy costs each.

As a program (``python -m``, with the number of ranks) it forks them from a process that has done nothing else, so that
little in them changes but what they do. Prints JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
from torch import nn

from streamflow.host_weights.remapping import give_memory_back
from streamflow.ranks.agreement import Agreement
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.ranks.coordinator import open_coordinator
from streamflow.stages.ranks.meeting import default_store
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.star import open_star
from streamflow.stages.threads import open_threads
from tests.ranks import Rank, run_ranks
from tests.streamflow.ranks.kit import copies_left, opened

#: The width of matrices of which 64 take 64 MiB.
WIDTH = 512
OPTIONS = WaveOptions(max_passes=1, rank_deadline_s=10.0, heartbeat_s=0.01)
#: What a child does once it can agree with the others; returns what the test looks at.
Body = Callable[[Agreement], Awaitable[Any]]


class Matrices(nn.Module):
    """64 matrices, all but one of them in blocks."""

    class Matrix(nn.Module):
        def __init__(self, width: int, number: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(values(width, number), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x @ self.weight
            return out

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(self.Matrix(width, number) for number in range(63))
        self.head = self.Matrix(width, 63)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = each(x)
        out: torch.Tensor = self.head(x)
        return out


def values(width: int, number: int) -> torch.Tensor:
    return torch.arange(width * width, dtype=torch.float32).view(width, width).add_(number)


def are_right(model: Matrices, but: str = "") -> bool:
    """Whether ``state_dict()`` says of every weight but one what it was made of."""
    found = {name: tensor for name, tensor in model.state_dict().items() if name != but}
    numbers = {name: int(name.split(".")[1]) if name.startswith("blocks") else 63 for name in found}
    return all(torch.equal(tensor, values(model.width, numbers[name])) for name, tensor in found.items())


def in_rank(body: Body) -> Callable[[Rank], object]:
    """What a child does: join, agree that all are there, run ``body``."""

    @asynccontextmanager
    async def agreeing(rank: Rank) -> AsyncIterator[Agreement]:
        deadline_s = OPTIONS.rank_deadline_s
        async with (
            open_threads() as crew,
            open_star(
                crew, default_store(), "test", rank=rank.rank, size=rank.size, timeout_s=deadline_s, arrival_s=20.0
            ) as control,
            open_coordinator(control, crew, OPTIONS) as coordinator,
        ):
            yield coordinator

    async def main(rank: Rank) -> object:
        async with agreeing(rank) as agreement:
            return await body(agreement)

    def work(rank: Rank) -> object:
        gc.freeze()  # what is collected here need not be looked through, nor copied for it
        rank.join()
        return anyio.run(main, rank, backend=("asyncio", "trio")[rank.rank % 2])

    return work


def memory() -> dict[str, int]:
    """Bytes of this process once all is settled, but for those of files: of these, others on the machine take parts."""
    gc.collect()
    give_memory_back()
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    found = {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in lines}
    return {"Pss": found["Pss"] - found["Pss_File"], "Private_Dirty": found["Private_Dirty"]}


async def share(agreement: Agreement) -> dict[str, Any]:
    """What a rank takes before it loads, with its own weights, while they are shared, and after closing."""
    readings: dict[str, dict[str, int]] = {}

    async def measure(when: str) -> None:
        await agreement.agree(f"all are there: {when}", None)
        readings[when] = await anyio.to_thread.run_sync(memory)  # long enough for the others to miss this rank's loop
        await agreement.agree(f"all have measured: {when}", None)

    async with opened(Matrices(WIDTH), agreement, {"packing_threads": 2}, CpuDevice()):
        await agreement.agree("what is needed once is there", None)
    await measure("before")
    model = Matrices(WIDTH)
    await measure("loaded")
    async with opened(model, agreement, {"packing_threads": 2}, CpuDevice()):
        is_right = [are_right(model)]
        await measure("open")
    is_right.append(are_right(model))
    await measure("closed")
    del model
    return {"readings": readings, "is_right": is_right, "left": copies_left()}


if __name__ == "__main__":
    are_right(Matrices(8))
    sys.stdout.write(json.dumps(run_ranks(int(sys.argv[1]), in_rank(share))))
