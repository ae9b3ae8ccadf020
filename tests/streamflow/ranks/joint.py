"""Ranks that gather, in processes of their own: what each is asked for, what came of it, and what must be left."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
import torch
from torch import nn

import streamflow
from streamflow import Offload, OffloadStatistics
from streamflow.ranks.topology import RankGroups
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank
from tests.streamflow.kit import aligned_reference, declared_bytes, in_worker, sha256_of, streamflow_threads
from tests.streamflow.ranks.kit import copies_left

WIDTH = 24
STEPS = 3
#: What a connection to another rank, and the loop in torch that serves it, have open.
CONNECTIONS = Counter({"socket": 1000, "anon_inode": 1000})
#: Within it the ranks of these tests know of one that is dead or silent.
RANK_DEADLINE_S = 2.0


class Block(nn.Module):
    """``hidden`` makes it large or small."""

    def __init__(self, hidden: int, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.silu(self.up(x)))
        return out


class Denoiser(nn.Module):
    """Blocks of unequal sizes; what it makes of a prompt depends on every weight.

    ``goes_back``: it runs its first block again at the end of a pass. ``pause_s``: how long it does nothing before each
    block.
    """

    goes_back = False
    pause_s = 0.0

    def __init__(self, hidden: Sequence[int] = (160, 32, 35, 160, 7)) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.transformer_blocks = nn.ModuleList(Block(size) for size in hidden)

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        x = x + self.condition(prompt)
        for block in self.transformer_blocks:
            time.sleep(self.pause_s)
            x = block(x)
        if self.goes_back:
            x = self.transformer_blocks[0](x)
        return x


@attrs.frozen
class Asked:
    """A request: what to make, and how."""

    prompt: str = "a red fox"
    seed: int = 0
    steps: int = STEPS

    @property
    def wave(self) -> WaveSignature:
        return WaveSignature((("Denoiser", self.steps),))

    def embedding(self) -> torch.Tensor:
        return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(zlib.crc32(self.prompt.encode())))

    @torch.no_grad()
    def make(self, model: Callable[..., torch.Tensor], on_step: Callable[[int], object] = lambda step: None) -> str:
        """The digest of the picture; ``on_step`` is called before each step."""
        latents = torch.randn(2 + self.seed % 3, WIDTH, generator=torch.Generator().manual_seed(self.seed))
        for step in range(self.steps):
            on_step(step)
            latents = model(latents, self.embedding()) / 2
        return sha256_of(latents)


PROMPTS = ("a red fox", "a blue bird", "a green frog", "a grey cat", "an owl", "a hare", "a mole", "a newt")


def asked_of(rank: int, number: int = 0, steps: int = STEPS) -> Asked:
    """Request ``number`` of ``rank``: no two have a prompt, or a seed, in common."""
    index = 2 * rank + number
    return Asked(PROMPTS[index % len(PROMPTS)] + f" {index // len(PROMPTS)}", 100 + index, steps)


@functools.cache
def alone(asked: Asked, build: Callable[[], nn.Module] = Denoiser) -> str:
    """What the resident model makes of it, alone in its process."""
    return in_worker(lambda: asked.make(aligned_reference(build())))


@attrs.frozen
class Outcome:
    """What came of a request, or of opening or closing: ``value``, or the errors, from the one raised to its causes."""

    value: Any = None
    errors: tuple[str, ...] = ()
    text: str = ""
    rank: int | None = None
    seconds: float = 0.0

    @property
    def error(self) -> str | None:
        return self.errors[0] if self.errors else None


async def outcome_of(work: Awaitable[Any]) -> Outcome:
    """What comes of ``work``; only errors are caught."""
    started = time.monotonic()
    try:
        value = await work
    except Exception as failure:
        return failed(failure, time.monotonic() - started)
    return Outcome(value, seconds=time.monotonic() - started)


def failed(failure: BaseException, seconds: float = 0.0) -> Outcome:
    """The outcome that ``failure`` is."""
    chain: list[BaseException] = []
    link: BaseException | None = failure
    while link is not None:
        chain.append(link)
        link = link.__cause__
    rank = next((error.rank for error in chain if hasattr(error, "rank")), None)
    return Outcome(None, tuple(type(error).__name__ for error in chain), str(failure), rank, seconds)


def options(**changes: Any) -> dict[str, Any]:
    """Options of an offload; those of ``ranks`` are merged with what all tests here use."""
    ranks = {
        "gather": "always",
        "local_blocks": "none",
        "gather_chunk_bytes": 4096,
        "rank_deadline_s": RANK_DEADLINE_S,
        "heartbeat_s": 0.02,
        "wave_window_s": 1.0,
        **changes.pop("ranks", {}),
    }
    return {"device": "cpu", "poison_freed_slots": True, "stateful_modules": (), "ranks": ranks, **changes}


@attrs.define
class Member:
    """A rank that has an offload open with the others; ``asking`` gives what comes of a request."""

    rank: Rank
    model: Any
    offload: Offload
    device: CpuDevice

    async def ask(
        self, asked: Asked, on_step: Callable[[int], object] = lambda step: None, wave: WaveSignature | None = None
    ) -> Outcome:
        """What comes of ``asked``; ``wave`` None: what it needs."""
        request = self.offload.request(wave=asked.wave if wave is None else wave, request_id=asked.prompt)
        return await outcome_of(request.run(asked.make, self.model, on_step))

    async def meet(self, name: str) -> None:
        """Return once every rank is here. A barrier of the test's, over the folder that all share."""
        (self.rank.folder / f"{name}-{self.rank.rank}").touch()
        await there(self.rank, *(f"{name}-{rank}" for rank in range(self.rank.size)))

    def announce(self, name: str) -> None:
        """Let those go on who wait for ``name`` by `there`. From any thread."""
        (self.rank.folder / name).touch()

    def seen(self) -> Seen:
        return Seen.of(self.offload.statistics())


async def there(rank: Rank, *names: str) -> None:
    """Return once a rank has announced each of ``names``."""
    while not all((rank.folder / name).exists() for name in names):  # noqa: ASYNC110 - another process sets it
        await anyio.sleep(0.005)


def wait_there(rank: Rank, name: str) -> None:
    """`there`, for a thread."""
    while not (rank.folder / name).exists():
        time.sleep(0.005)


@attrs.frozen
class Seen:
    """What the statistics of one rank show."""

    transfer: str
    reason: str
    state: str
    num_walks: int
    num_passes: int
    streamed_bytes: int
    peak_is_small: bool

    @classmethod
    def of(cls, statistics: OffloadStatistics) -> Seen:
        engine = statistics.engine
        return cls(
            statistics.choice.transfer,
            statistics.choice.transfer_reason,
            statistics.state,
            engine.num_walks,
            engine.num_passes,
            engine.streamed_bytes,
            engine.device_peak_bytes <= declared_bytes(statistics),
        )


def leftovers() -> dict[str, Counter[str]]:
    """What streamflow could leave in this process, and on this machine."""
    return {
        "threads": Counter(streamflow_threads()),
        "fds": _fds(),
        "shm": Counter(path.name for path in Path("/dev/shm").iterdir() if "streamflow" in path.name),
        "copies": Counter(copies_left()),
    }


def _fds() -> Counter[str]:
    return Counter(_kind_of(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}"))


def _kind_of(fd: str) -> str:
    """What a descriptor is of, without what names this one among its kind."""
    return os.readlink(f"/proc/self/fd/{fd}").split(":[")[0]


def assert_nothing_left(before: Mapping[str, Counter[str]], patience_s: float = 2.0) -> None:
    """Fail if there is more than before; sockets of the test's own group may have gone with another rank."""
    until = time.monotonic() + patience_s
    while (open_ends := _fds() - before["fds"]) & CONNECTIONS and time.monotonic() < until:
        time.sleep(0.02)
    assert not open_ends & CONNECTIONS, f"connections that wait for the garbage collector: {open_ends}"
    while (left := _more(leftovers(), before)) and time.monotonic() < until:  # gloo's go a little after their group
        gc.collect()
        time.sleep(0.02)
    assert not left, f"left behind: {left}"


def _more(now: Mapping[str, Counter[str]], before: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {kind: now[kind] - before[kind] for kind in now if now[kind] - before[kind]}


def joined(rank: Rank, timeout_s: float = 20.0) -> dict[str, Counter[str]]:
    """Join the others, in a child; returns what there was before anything is opened."""
    gc.disable()  # what is closed is gone at once
    gc.freeze()  # what was forked need not be looked through, nor copied for it
    rank.join(timeout_s=timeout_s)
    return leftovers()


Scenario = Callable[[Member], Awaitable[Any]]


#: Numbers the openings of this process: each is one of every rank.
_openings = itertools.count()


@asynccontextmanager
async def opened(
    rank: Rank, model: Any, *, groups: RankGroups | None = None, device: CpuDevice | None = None, **changes: Any
) -> AsyncIterator[Member]:
    """This rank's offload, with those of the others, which have joined. ``groups`` None: all are data-parallel."""
    groups = groups or RankGroups(data_parallel=torch.distributed.group.WORLD)
    device = device or CpuDevice()
    joint = streamflow.open_offload(model, options(**changes), ranks=groups, device=device)
    async with joint as offload:
        member = Member(rank, model, offload, device)
        await member.meet(f"open {next(_openings)}")  # a busy machine opens some much later than others
        yield member


def live(
    rank: Rank,
    scenario: Scenario,
    *,
    backend: str = "asyncio",
    build: Callable[[], Any] = Denoiser,
    timeout_s: float = 20.0,
    **changes: Any,
) -> Any:
    """In a child: open with the others, do ``scenario``, close, and leave nothing. Returns what it returned."""
    before = joined(rank, timeout_s)

    async def main() -> Any:
        async with opened(rank, build(), **changes) as member:
            result = await scenario(member)
        assert member.device.memory().in_use == 0
        assert member.offload.state == "closed"
        return result

    result = anyio.run(main, backend=backend)
    assert_nothing_left(before)
    return result


def backend_of(rank: Rank | int) -> str:
    """Loops alternate among the ranks: what one rank's loop does is nothing to the others."""
    return ["asyncio", "trio"][(rank if isinstance(rank, int) else rank.rank) % 2]
