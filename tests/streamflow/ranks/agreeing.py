"""Ranks in one process that agree through memory: each a task, with what it says going through JSON as on a wire."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs


class RankGoneError(RuntimeError):
    """Another rank has left before it agreed."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} left before {name!r}")


@attrs.define
class _Round:
    name: str
    values: dict[int, str] = attrs.field(factory=dict)
    changed: anyio.Event = attrs.field(factory=anyio.Event)


class AgreeingRanks:
    """``size`` ranks. ``names`` are what they agreed on so far, in order.

    ``before`` is awaited by each rank before it agrees on something, with its number and the name.
    """

    def __init__(self, size: int, before: Callable[[int, str], Awaitable[None]] | None = None) -> None:
        self.size = size
        self.names: list[str] = []
        self._before = before
        self._rounds: list[_Round] = []
        self._gone: list[int] = []

    async def agree(self, rank: int, number: int, name: str, value: object) -> list[Any]:
        if self._before is not None:
            await self._before(rank, name)
        if number == len(self._rounds):
            self._rounds.append(_Round(name))
        current = self._rounds[number]
        assert current.name == name, f"rank {rank} agrees on {name!r}, others on {current.name!r}"
        current.values[rank] = json.dumps(value)
        while len(current.values) < self.size:
            missing = [gone for gone in self._gone if gone not in current.values]
            if missing:
                raise RankGoneError(missing[0], name)
            self._tell(current)
            await current.changed.wait()
        self._tell(current)
        if name not in self.names:
            self.names.append(name)
        return [json.loads(current.values[each]) for each in range(self.size)]

    def leave(self, rank: int) -> None:
        self._gone.append(rank)
        for current in self._rounds:
            self._tell(current)

    def _tell(self, current: _Round) -> None:
        current.changed.set()
        if len(current.values) < self.size:
            current.changed = anyio.Event()


@attrs.define
class AgreeingRank:
    """One of them."""

    rank: int
    size: int
    ranks: AgreeingRanks
    num_agreed: int = 0

    async def agree(self, name: str, value: object) -> list[Any]:
        number, self.num_agreed = self.num_agreed, self.num_agreed + 1
        return await self.ranks.agree(self.rank, number, name, value)


async def on_ranks(
    ranks: AgreeingRanks, work: Callable[[AgreeingRank], Awaitable[Any]], *, within_s: float = 30.0
) -> list[Any]:
    """What ``work`` returns or raises on each rank, by rank. A rank is gone once its work has ended."""
    outcomes: list[Any] = [None] * ranks.size

    async def run(rank: int) -> None:
        try:
            outcomes[rank] = await work(AgreeingRank(rank, ranks.size, ranks))
        except Exception as failure:
            outcomes[rank] = failure
        finally:
            ranks.leave(rank)

    with anyio.fail_after(within_s):
        async with anyio.create_task_group() as tasks:
            for rank in range(ranks.size):
                tasks.start_soon(run, rank)
    return outcomes
