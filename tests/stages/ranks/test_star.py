"""Ranks in processes of their own, over the gloo star: who dies, stands still, blocks or leaves is named in time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from streamflow.stages.ranks.coordinator import Coordinator, open_coordinator
from streamflow.stages.ranks.edge import Edge
from streamflow.stages.ranks.errors import RankClosedError, RankError, RankFailedError, RankLostError
from streamflow.stages.ranks.meeting import default_store
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.ranks.star import open_star
from streamflow.stages.testing.waves import ScriptedWaves
from streamflow.stages.threads import open_threads
from tests.ranks import Rank, forked_ranks, run_ranks

OPTIONS = WaveOptions(max_passes=1, window_s=0.05, rank_deadline_s=2.0, heartbeat_s=0.02)
#: What a busy machine may add to any time.
SLACK_S = 1.0
#: What runs in a child once its coordinator is open; returns what the test looks at.
Body = Callable[[Coordinator, ScriptedWaves], Awaitable[Any]]
EVERY_RANK_OF_3 = pytest.mark.parametrize("lost", [0, 1, 2])


@asynccontextmanager
async def open_rank(rank: Rank, name: str = "test") -> AsyncIterator[tuple[Coordinator, ScriptedWaves]]:
    waves = ScriptedWaves(anyio.current_time)
    async with (
        open_threads() as crew,
        open_star(
            crew,
            default_store(),
            name,
            rank=rank.rank,
            size=rank.size,
            timeout_s=OPTIONS.rank_deadline_s,
            arrival_s=20.0,
        ) as control,
        open_coordinator(control, crew, OPTIONS) as coordinator,
    ):
        coordinator.attach(waves)
        yield coordinator, waves


def in_rank(body: Body, backend: str = "asyncio") -> Callable[[Rank], object]:
    """What a child does: join, open, say so, run ``body``, close."""

    async def main(rank: Rank) -> object:
        async with open_rank(rank) as (coordinator, waves):
            await coordinator.agree("open", rank.rank)
            rank.say("open")
            return await body(coordinator, waves)

    def work(rank: Rank) -> object:
        rank.join()
        answer = anyio.run(main, rank, backend=backend)
        return answer, time.monotonic(), [t.name for t in threading.enumerate() if t.name.startswith("streamflow")]

    return work


async def wait_for_the_end(coordinator: Coordinator, waves: ScriptedWaves) -> object:
    """Wait for the error that ends an agreement; returns when it came, and what it and the engine's failure are."""
    try:
        await coordinator.agree("never", 0)
    except RankError as error:
        came = time.monotonic()
        failure = waves.failure
        assert type(failure) in (type(error), type(None))
        return came, type(error).__name__, error.rank, error.reason, failure is not None
    return None


def idle(lost: int) -> Body:
    """Rank ``lost`` does nothing; the others wait for it."""

    async def body(coordinator: Coordinator, waves: ScriptedWaves) -> object:
        if coordinator.rank == lost:
            await anyio.sleep_forever()
        return await wait_for_the_end(coordinator, waves)

    return body


def check(outcomes: list[Any], since: float, kind: type[RankError], rank: int, *, breaks: bool = True) -> None:
    """Every outcome is an error of ``kind`` that names ``rank``, in time; closing was bounded and left no thread."""
    for (came, name, named, _, is_broken), closed, threads in outcomes:
        assert (name, named, is_broken) == (kind.__name__, rank, breaks)
        assert came - since < OPTIONS.rank_deadline_s + OPTIONS.idle_heartbeat_s + SLACK_S
        assert closed - came < OPTIONS.rank_deadline_s + SLACK_S
        assert threads == []


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ranks_agree_and_walk_together(size: int, backend: str) -> None:
    signature = WaveSignature((("transformer", 2),))

    async def body(coordinator: Coordinator, waves: ScriptedWaves) -> object:
        large = await coordinator.agree("large", "x" * 100_000 * coordinator.rank)
        changed = anyio.Event()
        tell = waves.on_change

        def told() -> None:
            tell()
            changed.set()

        waves.on_change = told
        if coordinator.rank == 1:
            waves.add(signature)
        while not waves.begun:
            await changed.wait()
            changed = anyio.Event()
        while waves.can_walk():
            waves.walk()
        await coordinator.agree("done", 0)
        return [len(value) for value in large], waves.num_walks_done, waves.failure

    outcomes = run_ranks(size, in_rank(body, backend))
    assert [outcome[0] for outcome in outcomes] == [([100_000 * r for r in range(size)], {1: 2}, None)] * size
    assert [outcome[2] for outcome in outcomes] == [[]] * size


@EVERY_RANK_OF_3
def test_a_killed_rank_is_named(lost: int) -> None:
    others = [rank for rank in range(3) if rank != lost]
    with forked_ranks(3, in_rank(idle(lost))) as ranks:
        for rank in range(3):
            ranks.wait_for("open", of=rank)
        since = time.monotonic()
        ranks.kill(lost)
        check(ranks.answers(of=others), since, RankLostError, lost)


@EVERY_RANK_OF_3
def test_a_rank_that_stands_still_is_named(lost: int) -> None:
    others = [rank for rank in range(3) if rank != lost]
    with forked_ranks(3, in_rank(idle(lost), "trio")) as ranks:
        for rank in range(3):
            ranks.wait_for("open", of=rank)
        since = time.monotonic()
        ranks.stop(lost)
        check(ranks.answers(of=others), since, RankLostError, lost)


@pytest.mark.parametrize("blocked", [0, 1])
def test_a_rank_whose_loop_is_blocked_is_named_and_learns_of_it(blocked: int) -> None:
    async def body(coordinator: Coordinator, waves: ScriptedWaves) -> object:
        if coordinator.rank == blocked:
            time.sleep(1.5 * OPTIONS.rank_deadline_s)  # noqa: ASYNC251 - the fault under test
        return await wait_for_the_end(coordinator, waves)

    with forked_ranks(2, in_rank(body)) as ranks:
        ranks.wait_for("open", of=1 - blocked)
        since = time.monotonic()
        check(ranks.answers(of=[1 - blocked]), since, RankLostError, blocked)
        [((_, name, named, reason, is_broken), _, threads)] = ranks.answers(of=[blocked])
        assert (name, named, is_broken, threads) == ("RankLostError", blocked, True, [])
        assert "loop was blocked" in reason


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_raises_while_it_opens_is_named_with_its_reason(failing: int) -> None:
    async def body(coordinator: Coordinator, waves: ScriptedWaves) -> object:
        if coordinator.rank == failing:
            raise OSError("no such checkpoint")
        return await wait_for_the_end(coordinator, waves)

    def work(rank: Rank) -> object:
        try:
            return in_rank(body)(rank)
        except OSError as error:
            return str(error)

    with forked_ranks(3, work) as ranks:
        answers = ranks.answers()
    assert answers.pop(failing) == "no such checkpoint"
    check(answers, time.monotonic(), RankFailedError, failing)
    assert {answer[0][3] for answer in answers} == {"OSError: no such checkpoint"}


@EVERY_RANK_OF_3
def test_a_rank_that_closes_first_is_named_and_breaks_nothing(lost: int) -> None:
    async def body(coordinator: Coordinator, waves: ScriptedWaves) -> object:
        return None if coordinator.rank == lost else await wait_for_the_end(coordinator, waves)

    others = [rank for rank in range(3) if rank != lost]
    with forked_ranks(3, in_rank(body)) as ranks:
        ranks.wait_for("open", of=lost)
        check(ranks.answers(of=others), time.monotonic(), RankClosedError, lost, breaks=False)
        assert ranks.answers(of=[lost])[0][0] is None


def test_a_rank_that_never_comes_is_named_by_all_and_they_can_meet_again() -> None:
    async def open_star_once(rank: Rank, arrival_s: float) -> object:
        place = {"rank": rank.rank, "size": rank.size, "timeout_s": 2.0, "arrival_s": arrival_s}
        try:
            async with open_threads() as crew, open_star(crew, default_store(), "late", **place) as control:
                return control.size
        except RankLostError as error:
            return error.rank

    def work(rank: Rank) -> object:
        rank.join()
        given_up = [f"rank {other} gave up" for other in (0, 1)]
        if rank.rank == 2:
            first = None
            default_store().wait(given_up)
        else:
            first = anyio.run(open_star_once, rank, 0.5 if rank.rank == 0 else 20.0)
            default_store().set(given_up[rank.rank], "")
        return first, anyio.run(open_star_once, rank, 20.0)

    first, second = zip(*run_ranks(3, work), strict=True)
    assert first == (2, 2, None)
    assert second == (3, 3, 3)


def test_a_meeting_that_is_cancelled_ends_at_once() -> None:
    async def main(rank: Rank) -> float:
        started = time.monotonic()
        with anyio.move_on_after(0.2):
            async with open_rank(rank):
                raise AssertionError("nobody else is there")
        return time.monotonic() - started

    def work(rank: Rank) -> object:
        rank.join()
        return [anyio.run(main, rank, backend=backend) for backend in ("asyncio", "trio")] if rank.rank == 0 else None

    assert all(seconds < 0.2 + SLACK_S for seconds in run_ranks(2, work)[0])


def test_a_rank_that_dies_while_they_connect_is_named_by_all() -> None:
    async def main(rank: Rank) -> object:
        try:
            async with open_rank(rank):
                return None
        except RankLostError as error:
            return error.rank

    def work(rank: Rank) -> object:
        rank.join()
        if rank.rank == 2:
            Edge.connect = lambda *_, **__: os._exit(0)  # type: ignore[method-assign]
        return anyio.run(main, rank)

    with forked_ranks(3, work) as ranks:
        assert ranks.answers(of=[0, 1]) == [2, 2]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_offloads_can_be_opened_one_after_the_other_whatever_groups_there_are(backend: str) -> None:
    async def main(rank: Rank) -> list[Any]:
        answers = []
        for number in range(3):
            async with open_rank(rank) as (coordinator, _):
                answers.append(await coordinator.agree("open", [number, rank.rank]))
        return answers

    def work(rank: Rank) -> object:
        rank.join()
        return anyio.run(main, rank, backend=backend)

    assert run_ranks(2, work) == [[[[number, 0], [number, 1]] for number in range(3)]] * 2


PROGRAM = """
import os, sys, tempfile, time
import anyio, torch.distributed as dist
from streamflow.stages.ranks.coordinator import open_coordinator
from streamflow.stages.ranks.edge import Edge
from streamflow.stages.ranks.errors import RankLostError
from streamflow.stages.ranks.meeting import default_store
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.star import open_star
from streamflow.stages.threads import open_threads

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
rank, path = int(os.fork() == 0), sys.argv[1]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)

async def main():
    options = WaveOptions(max_passes=1, rank_deadline_s=1.0, heartbeat_s=0.02)
    async with (
        open_threads() as crew,
        open_star(crew, default_store(), "exit", rank=rank, size=2, timeout_s=2.0, arrival_s=20.0) as control,
        open_coordinator(control, crew, options) as coordinator,
    ):
        await coordinator.agree("open", 0)
        if rank == 1:
            os._exit(0)
        await coordinator.agree("never", 0)

try:
    anyio.run(main)
except RankLostError as error:
    print(error.rank, flush=True)
"""


@pytest.mark.slow
def test_an_interpreter_whose_ranks_failed_exits(tmp_path: Any) -> None:
    arguments = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(arguments, timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
