"""A rank that dies, stands still, breaks or goes: the others know which one, in time, and nothing of theirs is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import attrs
import pytest

from streamflow.ranks.shared_source import SharedPiece
from streamflow.stages.signals import loop_waker
from tests.ranks import Rank, forked_ranks
from tests.streamflow.ranks.joint import (
    RANK_DEADLINE_S,
    Denoiser,
    Member,
    Outcome,
    alone,
    asked_of,
    assert_nothing_left,
    backend_of,
    failed,
    joined,
    opened,
    there,
    wait_there,
)

#: What a busy machine may take beyond the deadline of ranks.
SLACK_S = 3.0
LIMIT_S = RANK_DEADLINE_S + SLACK_S


@attrs.define
class Survivor:
    """What a rank tells after another one failed: its request's outcome, a later one's, and how it closed."""

    request: Outcome | None = None
    later: Outcome | None = None
    closing: Outcome = attrs.Factory(Outcome)
    state: str = ""
    state_after: str = ""


async def survive(rank: Rank, scenario: Callable[[Member, Survivor], Awaitable[None]], **changes: Any) -> Survivor:
    """Open, do ``scenario``, close; whatever leaves is noted, and when the closing began."""
    survivor, member, left_at = Survivor(), None, time.monotonic()
    try:
        async with opened(rank, Denoiser(), **changes) as member:
            try:
                await scenario(member, survivor)
                survivor.state = member.offload.state
                survivor.later = await member.ask(asked_of(rank.rank, 1))
            finally:
                left_at = time.monotonic()
    except Exception as failure:
        survivor.closing = failed(failure, time.monotonic() - left_at)
    else:
        survivor.closing = Outcome("closed", seconds=time.monotonic() - left_at)
    if member is not None:
        survivor.state_after = member.offload.state
        assert member.device.memory().in_use == 0
    return survivor


def ranks_that(
    scenario: Callable[[Member, Survivor], Awaitable[None]],
    *,
    before: Callable[[Rank], object] | None = None,
    **changes: Any,
) -> Callable[[Rank], object]:
    """The work of ranks that survive ``scenario`` and leave nothing."""

    def work(rank: Rank) -> object:
        there_before = joined(rank)
        if before is not None:
            before(rank)
        survivor = anyio.run(lambda: survive(rank, scenario, **changes), backend=backend_of(rank))
        assert_nothing_left(there_before)
        return survivor

    return work


def assert_survived(survivors: list[Survivor], error: str, lost: int, *, ran: bool = True) -> None:
    """Each got ``error``, of rank ``lost``, in time; later ones, too; and closed in time."""
    for survivor in survivors:
        outcomes = [survivor.later] if not ran else [survivor.request, survivor.later]
        for outcome in outcomes:
            assert outcome is not None, survivor
            assert error in outcome.errors, survivor
            assert outcome.rank == lost, survivor
            assert f"rank {lost}" in outcome.text, survivor
        assert survivor.later.seconds < 1.0, survivor
        assert survivor.request is None or survivor.request.seconds < LIMIT_S, survivor
        assert survivor.closing.seconds < LIMIT_S, survivor
        assert (survivor.state, survivor.state_after) == ("broken", "closed"), survivor


def at_step(member: Member, do: Callable[[], object], which: int = 1) -> Callable[[int], object]:
    return lambda step: do() if step == which else None


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_that_dies_or_stands_still_in_a_walk(how: str, who: int) -> None:
    async def scenario(member: Member, survivor: Survivor) -> None:
        rank = member.rank

        def on_step(step: int) -> None:
            if step == 1 and rank.rank == who:
                rank.say("in the middle")
                time.sleep(60)

        survivor.request = await member.ask(asked_of(rank.rank), on_step)

    with forked_ranks(3, ranks_that(scenario)) as ranks:
        ranks.wait_for("in the middle", of=who)
        (ranks.kill if how == "kill" else ranks.stop)(who)
        survivors = ranks.answers(of=[rank for rank in range(3) if rank != who])
    assert_survived(survivors, "RankLostError", who)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_that_dies_or_stands_still_while_nobody_asks(how: str, who: int) -> None:
    async def scenario(member: Member, survivor: Survivor) -> None:
        member.rank.say("open")
        while member.offload.state == "ready":  # noqa: ASYNC110 - nothing tells of it but the next request
            await anyio.sleep(0.01)

    with forked_ranks(2, ranks_that(scenario)) as ranks:
        for rank in range(2):
            ranks.wait_for("open", of=rank)
        (ranks.kill if how == "kill" else ranks.stop)(who)
        survivors = ranks.answers(of=[1 - who])
    assert_survived(survivors, "RankLostError", who, ran=False)


def test_a_rank_whose_event_loop_is_blocked() -> None:
    async def scenario(member: Member, survivor: Survivor) -> None:
        if member.rank.rank == 1:
            await member.meet("open")
            time.sleep(RANK_DEADLINE_S + 1.0)  # noqa: ASYNC251 - that is the fault
        else:
            await member.meet("open")
        survivor.request = await member.ask(asked_of(member.rank.rank))

    with forked_ranks(2, ranks_that(scenario)) as ranks:
        survivors = ranks.answers()
    assert_survived(survivors[:1], "RankLostError", 1)
    # it knows by itself, as it comes to it
    assert_survived(survivors[1:], "RankLostError", 1)


def test_a_rank_whose_source_cannot_be_read() -> None:
    def cannot_read(*args: object) -> None:
        raise OSError("the disk is gone")

    async def scenario(member: Member, survivor: Survivor) -> None:
        def on_step(step: int) -> None:
            if step == 1 and member.rank.rank == 1:
                SharedPiece.read_into = cannot_read  # type: ignore[method-assign] # the process ends soon

        survivor.request = await member.ask(asked_of(member.rank.rank), on_step)

    with forked_ranks(2, ranks_that(scenario)) as ranks:
        survivors = ranks.answers()
    assert_survived(survivors[:1], "RankFailedError", 1)
    assert "the disk is gone" in survivors[0].request.text
    broken = survivors[1]
    assert "OSError" in broken.request.errors, broken
    assert (broken.state, broken.state_after) == ("broken", "closed")


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_closes_first_ends_the_gathering_and_breaks_nothing(who: int) -> None:
    def work(rank: Rank) -> object:
        before = joined(rank)

        async def main() -> Survivor:
            survivor = Survivor()
            async with opened(rank, Denoiser()) as member:
                survivor.request = await member.ask(asked_of(rank.rank))
                if rank.rank != who:
                    await there(rank, "closed")
                    survivor.later = await member.ask(asked_of(rank.rank, 1))
                    survivor.state = member.offload.state
                started = time.monotonic()
            survivor.closing = Outcome("closed", seconds=time.monotonic() - started)
            (rank.folder / "closed").touch()
            return survivor

        survivor = anyio.run(main, backend=backend_of(rank))
        assert_nothing_left(before)
        return survivor

    with forked_ranks(2, work) as ranks:
        survivors = ranks.answers()
    for rank, survivor in enumerate(survivors):
        assert survivor.request.value == alone(asked_of(rank))
        assert survivor.closing.seconds < 1.5
    refused = survivors[1 - who]
    assert ("RankClosedError" in refused.later.errors, refused.later.rank) == (True, who), refused
    assert refused.later.seconds < 1.0
    assert refused.state == "ready"


def test_a_rank_that_closes_while_others_run_feeds_them_to_their_end() -> None:
    def work(rank: Rank) -> object:
        before = joined(rank)

        async def main() -> Survivor:
            survivor = Survivor()

            def on_step(step: int) -> None:
                if step == 1:
                    (rank.folder / "under way").touch()
                    wait_there(rank, "closing")

            async with opened(rank, Denoiser()) as member:
                if rank.rank == 0:
                    survivor.request = await member.ask(asked_of(0), on_step)
                    survivor.later = await member.ask(asked_of(0, 1))
                else:
                    await there(rank, "under way")
                    (rank.folder / "closing").touch()
                started = time.monotonic()
            survivor.closing = Outcome("closed", seconds=time.monotonic() - started)
            return survivor

        survivor = anyio.run(main, backend=backend_of(rank))
        assert_nothing_left(before)
        return survivor

    with forked_ranks(2, work) as ranks:
        survivors = ranks.answers()
    assert survivors[0].request.value == alone(asked_of(0)), survivors
    assert ("RankClosedError" in survivors[0].later.errors, survivors[0].later.rank) == (True, 1), survivors
    assert max(survivor.closing.seconds for survivor in survivors) < LIMIT_S


def cancelled_by_the_loop(scope: anyio.CancelScope, in_loop: Callable[[Callable[[], object]], bool]) -> None:
    """Cancel ``scope`` from another thread; returns once whatever waits in it has seen that."""
    in_loop(scope.cancel)
    for _ in range(4):  # the loop runs what waits in the turn after; its next turns come no sooner
        turned = threading.Event()
        in_loop(turned.set)
        assert turned.wait(LIMIT_S)


@pytest.mark.parametrize("how", ["cancel", "interrupt"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_cancelled_or_interrupted_as_a_whole(who: int, how: str) -> None:
    """An interrupted program closes: it feeds the others to their end. One that is cancelled can wait for nothing."""
    whole: list[Callable[[], None]] = []

    def end() -> None:
        if how == "cancel":
            whole[0]()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    async def scenario(member: Member, survivor: Survivor) -> None:
        def on_step(step: int) -> None:
            if step == 1 and member.rank.rank == who:
                end()

        survivor.request = await member.ask(asked_of(member.rank.rank), on_step)

    def work(rank: Rank) -> object:
        before = joined(rank)
        signal.signal(signal.SIGINT, signal.default_int_handler)

        async def main() -> object:
            with anyio.CancelScope() as scope:
                whole.append(partial(cancelled_by_the_loop, scope, loop_waker()))
                return await survive(rank, scenario)
            return "cancelled"

        try:
            survivor = anyio.run(main, backend=backend_of(rank))
        except KeyboardInterrupt:
            survivor = "interrupted"
        assert_nothing_left(before)
        return survivor

    with forked_ranks(2, work) as ranks:
        survivors = ranks.answers()
    other = survivors[1 - who]
    if how == "cancel":
        assert survivors[who] == "cancelled"
        assert_survived([other], "RankClosedError", who)
    else:
        assert survivors[who] == "interrupted"
        assert other.request.value == alone(asked_of(1 - who)), other
        assert ("RankClosedError" in other.later.errors, other.later.rank) == (True, who), other
