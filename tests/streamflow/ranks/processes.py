"""A program: ranks that are processes, forked from one that has imported torch and started nothing yet.

Each loads the same model and opens it with the others. Prints, as JSON, what each has told in each scenario, and how it
ended; one that ended without a word has told nothing.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import torch
from torch import nn

from streamflow.host_weights.remapping import give_memory_back
from streamflow.ranks.errors import WeightsDifferError
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.ranks.agreeing import RankGoneError
from tests.streamflow.ranks.kit import STEPS, copies_left, opened

#: How long the ranks of one scenario may take.
LIMIT_S = 40.0


class Matrices(nn.Module):
    """64 matrices of ``width``, all but one of them in blocks: 64 MiB if that is 512."""

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


def memory() -> dict[str, int]:
    """Bytes of this process by kind, once all is settled."""
    gc.collect()
    give_memory_back()
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    found = {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in lines}
    return {name: found[name] for name in ("Pss", "Private_Dirty")}


@attrs.define
class PipedRank:
    """A rank that agrees with the others through the parent, which reads from ``to_parent``."""

    rank: int
    size: int
    to_parent: int
    from_parent: int
    before: Callable[[str], object] = lambda name: None

    async def agree(self, name: str, value: object) -> list[Any]:
        self.before(name)
        self.tell({"agree": name, "value": value})
        answer = json.loads(await anyio.to_thread.run_sync(self._line))
        if "gone" in answer:
            raise RankGoneError(answer["gone"], name)
        values: list[Any] = answer["values"]
        return values

    def tell(self, message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.to_parent, data) :]

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self.from_parent, 1 << 16)
        return line


Scenario = Callable[[PipedRank], Awaitable[Any]]


@attrs.define
class Hub:
    """The parent's end: hears every rank, and answers all at once."""

    pids: list[int]
    reads: list[int]
    writes: list[int]
    told: list[Any]
    buffers: list[bytes]

    def serve(self) -> None:
        """Until every rank has ended or the time is over."""
        deadline = time.monotonic() + LIMIT_S
        asked: dict[int, Any] = {}
        alive = set(range(len(self.pids)))
        while alive and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self.reads[rank] for rank in alive], [], [], left)
            for rank in [rank for rank in alive if self.reads[rank] in ready]:
                data = os.read(self.reads[rank], 1 << 16)
                if not data:
                    alive.discard(rank)
                self.buffers[rank] += data
                *lines, self.buffers[rank] = self.buffers[rank].split(b"\n")
                for message in map(json.loads, lines):
                    if "agree" in message:
                        asked[rank] = message
                    else:
                        self.told[rank] = message["told"]
            self._answer(asked, alive)

    def _answer(self, asked: dict[int, Any], alive: set[int]) -> None:
        size = len(self.pids)
        gone = [rank for rank in range(size) if rank not in alive and rank not in asked]
        if gone:
            self._send(asked, {"gone": gone[0]})
        elif len(asked) == size:
            assert len({message["agree"] for message in asked.values()}) == 1, asked
            self._send(asked, {"values": [asked[rank]["value"] for rank in range(size)]})

    def _send(self, asked: dict[int, Any], answer: object) -> None:
        for rank in asked:
            try:
                os.write(self.writes[rank], json.dumps(answer).encode() + b"\n")
            except BrokenPipeError:
                continue
        asked.clear()


def run(size: int, scenario: Scenario) -> dict[str, Any]:
    """What each rank has told, and how it ended."""
    hub = Hub([], [], [], [None] * size, [b""] * size)
    for rank in range(size):
        here, to_parent = os.pipe()
        from_parent, there = os.pipe()
        pid = os.fork()
        if not pid:
            for end in (*hub.reads, *hub.writes, here, there):
                os.close(end)
            _child(PipedRank(rank, size, to_parent, from_parent), scenario)
        os.close(to_parent)
        os.close(from_parent)
        hub.pids.append(pid)
        hub.reads.append(here)
        hub.writes.append(there)
    try:
        hub.serve()
    finally:
        for pid in hub.pids:  # they have ended, or their time is over
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in hub.pids]
    return {"told": hub.told, "codes": codes}


def _child(rank: PipedRank, scenario: Scenario) -> None:
    code = 1
    try:
        rank.tell({"told": anyio.run(scenario, rank, backend=["asyncio", "trio"][rank.rank % 2])})
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


async def share(rank: PipedRank) -> dict[str, Any]:
    """How much memory each takes before it loads, with its own weights, while they are shared, and after closing."""
    readings: dict[str, dict[str, int]] = {}

    async def measure(when: str) -> None:
        await rank.agree(f"all are there: {when}", None)
        readings[when] = memory()
        await rank.agree(f"all have measured: {when}", None)

    async with opened(Matrices(512), rank, {"packing_threads": 2}, CpuDevice()):
        await rank.agree("what is needed once is there", None)
    await measure("before")
    model = Matrices(512)
    await measure("loaded")
    async with opened(model, rank, {"packing_threads": 2}, CpuDevice()):
        is_right = [are_right(model)]
        await measure("open")
    is_right.append(are_right(model))
    await measure("closed")
    del model
    return {"readings": readings, "is_right": is_right, "left": copies_left()}


async def differ(rank: PipedRank) -> Any:
    """The last rank has another weight."""
    model, changed = Matrices(64), "blocks.7.weight"
    if rank.rank == rank.size - 1:
        model.get_parameter(changed).data[-1, -1] += 1
    last = model.get_parameter(changed)[-1, -1].clone()
    try:
        async with opened(model, rank, {"packing_threads": 2}, CpuDevice()):
            return "it was opened"
    except WeightsDifferError as failure:
        found = [failure.rank, failure.block, failure.tensor]
    is_right = are_right(model, changed) and bool(model.get_parameter(changed)[-1, -1] == last)
    return {"found": found, "is_right": is_right, "left": copies_left()}


def kill(number: int, step: str) -> Scenario:
    """One rank is killed before it agrees on a step."""

    async def scenario(rank: PipedRank) -> Any:
        def die(name: str) -> None:
            if (rank.rank, name) == (number, step):
                os.kill(os.getpid(), signal.SIGKILL)

        rank.before = die
        model = Matrices(64)
        try:
            async with opened(model, rank, {"packing_threads": 2}, CpuDevice(), is_required=False):
                return "it was opened"
        except RankGoneError as failure:
            gone = failure.rank
        is_right = are_right(model)
        del model
        return {"gone": gone, "is_right": is_right, "left": copies_left()}

    return scenario


LISTING = "import os; print([os.readlink(fd.path) for fd in os.scandir('/proc/self/fd') if os.path.lexists(fd.path)])"


async def fork(rank: PipedRank) -> Any:
    """A forked child reads the weights and changes them, a program that is started has nothing of them."""
    model = Matrices(64)
    async with opened(model, rank, {"packing_threads": 2}, CpuDevice()):
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
    await rank.agree("all have forked", None)
    is_right = are_right(model)
    del model
    return {"started": "memfd" in started, "code": code, "is_right": is_right, "left": copies_left()}


SCENARIOS: dict[str, tuple[int, Scenario]] = {
    "2 share": (2, share),
    "4 share": (4, share),
    "4 differ": (4, differ),
    "2 fork": (2, fork),
    **{f"{number} is killed at {step}": (3, kill(number, step)) for number in (0, 2) for step in STEPS},
}

if __name__ == "__main__":
    are_right(Matrices(8))
    gc.collect()
    gc.freeze()  # what the children collect need not be looked through, nor copied for it
    sys.stdout.write(json.dumps({name: run(*SCENARIOS[name]) for name in SCENARIOS}))
