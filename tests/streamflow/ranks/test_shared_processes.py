"""Ranks that are processes: what their shared copy costs each of them, and that it goes when they go, however."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import pytest
import torch
from torch import nn

from streamflow.host_weights.remapping import give_memory_back
from streamflow.ranks.agreement import Agreement
from streamflow.ranks.errors import WeightsDifferError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.ranks.coordinator import open_coordinator
from streamflow.stages.ranks.errors import RankLostError
from streamflow.stages.ranks.meeting import default_store
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.star import open_star
from streamflow.stages.threads import open_threads
from tests.ranks import Rank, forked_ranks, run_ranks
from tests.streamflow.ranks.kit import STEPS, copies_left, opened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

MIB = 1 << 20
#: That of 64 matrices of this width.
MODEL_BYTES, WIDTH = 64 * MIB, 512
#: The window (2 MiB), and what threads and the interpreter take more or less from one reading to the next.
NOISE_BYTES = 5 * MIB
OPTIONS = WaveOptions(max_passes=1, rank_deadline_s=5.0, heartbeat_s=0.01)
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
    """Bytes of this process by kind, once all is settled."""
    gc.collect()
    give_memory_back()
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    found = {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in lines}
    return {name: found[name] for name in ("Pss", "Private_Dirty")}


async def share(agreement: Agreement) -> dict[str, Any]:
    """What a rank takes before it loads, with its own weights, while they are shared, and after closing."""
    readings: dict[str, dict[str, int]] = {}

    async def measure(when: str) -> None:
        await agreement.agree(f"all are there: {when}", None)
        readings[when] = memory()
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


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_takes_its_part_of_one_copy_and_nothing_of_its_own(size: int) -> None:
    for rank in run_ranks(size, in_rank(share)):
        before = rank["readings"].pop("before")
        more = {when: {kind: now[kind] - before[kind] for kind in now} for when, now in rank["readings"].items()}
        for kind in ("Pss", "Private_Dirty"):
            assert more["loaded"][kind] == pytest.approx(MODEL_BYTES, abs=NOISE_BYTES)
        for when in ("open", "closed"):
            assert more[when]["Pss"] == pytest.approx(MODEL_BYTES / size, abs=NOISE_BYTES)
            assert more[when]["Private_Dirty"] < NOISE_BYTES
        assert (rank["is_right"], rank["left"]) == ([True, True], [])


def test_a_rank_with_other_weights_is_named_on_all() -> None:
    changed = "blocks.7.weight"

    async def body(agreement: Agreement) -> Any:
        model = Matrices(64)
        if agreement.rank == 2:
            model.get_parameter(changed).data[-1, -1] += 1
        last = model.get_parameter(changed)[-1, -1].clone()
        try:
            async with opened(model, agreement, {"packing_threads": 2}, CpuDevice()):
                return "it was opened"
        except WeightsDifferError as failure:
            found = (failure.rank, failure.block, failure.tensor)
        is_right = are_right(model, changed) and bool(model.get_parameter(changed)[-1, -1] == last)
        return found, is_right, copies_left()

    assert run_ranks(3, in_rank(body)) == [((2, "blocks.7", changed), True, [])] * 3


@attrs.define
class Dying:
    """An agreement of a rank that is killed before it agrees on ``step``."""

    agreement: Agreement
    step: str

    @property
    def rank(self) -> int:
        return self.agreement.rank

    @property
    def size(self) -> int:
        return self.agreement.size

    async def agree(self, name: str, value: object) -> list[Any]:
        if name == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return await self.agreement.agree(name, value)


@pytest.mark.parametrize(("step", "killed"), [(step, index % 2 * 2) for index, step in enumerate(STEPS)])
def test_a_rank_that_is_killed_leaves_nothing_and_the_others_their_weights(step: str, killed: int) -> None:
    async def body(agreement: Agreement) -> Any:
        model = Matrices(64)
        mortal = Dying(agreement, step) if agreement.rank == killed else agreement
        try:
            async with opened(model, mortal, {"packing_threads": 2}, CpuDevice(), is_required=False):
                return "it was opened"
        except RankLostError as failure:
            lost = failure.rank
        is_right = are_right(model)
        del model
        return lost, is_right, copies_left()

    with forked_ranks(3, in_rank(body)) as ranks:
        assert ranks.answers(of={0, 1, 2} - {killed}) == [(killed, True, [])] * 2


LISTING = "import os; print([os.readlink(fd.path) for fd in os.scandir('/proc/self/fd') if os.path.lexists(fd.path)])"


def test_forked_children_read_the_weights_and_change_their_own_and_programs_get_nothing() -> None:
    async def body(agreement: Agreement) -> Any:
        model = Matrices(64)
        async with opened(model, agreement, {"packing_threads": 2}, CpuDevice()):
            command = [sys.executable, "-c", LISTING]
            started = await anyio.to_thread.run_sync(
                lambda: subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False).stdout
            )
        pid = os.fork()
        if not pid:
            was_right = are_right(model)
            model.head.weight.data.zero_()
            os._exit(0 if was_right and not model.head.weight.any() else 1)
        code = os.waitstatus_to_exitcode((await anyio.to_thread.run_sync(os.waitpid, pid, 0))[1])
        await agreement.agree("all have forked", None)
        is_right = are_right(model)
        del model
        return "memfd" in started, code, is_right, copies_left()

    assert run_ranks(2, in_rank(body)) == [(False, 0, True, [])] * 2
