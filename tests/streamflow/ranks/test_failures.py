"""A rank that dies, stands still, breaks or goes: the others know which one, in time, and nothing of theirs is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs
import pytest
import torch

from tests.ranks import ForkedRanks, Rank, forked_ranks
from tests.streamflow.kit import streamflow_threads
from tests.streamflow.ranks.joint import (
    RANK_DEADLINE_S,
    STEPS,
    Member,
    Outcome,
    alone,
    asked_of,
    assert_nothing_left,
    backend_of,
    failed,
    joined,
    opened,
    wait_there,
)
from tests.streamflow.ranks.joint import Denoiser

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
    scenario: Callable[[Member, Survivor], Awaitable[None]], *, before: Callable[[Rank], object] | None = None, **changes: Any
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
        while member.offload.state == "ready":
            await anyio.sleep(0.01)

    with forked_ranks(2, ranks_that(scenario)) as ranks:
        for rank in range(2):
            ranks.wait_for("open", of=rank)
        (ranks.kill if how == "kill" else ranks.stop)(who)
        survivors = ranks.answers(of=[1 - who])
    assert_survived(survivors, "RankLostError", who, ran=False)
