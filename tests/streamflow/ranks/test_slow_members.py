"""Requests whose own code does not go on, on ranks that are alive: the others' are not held up for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

import streamflow
from streamflow.ranks.topology import RankGroups
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.ranks.joint import (
    STEPS,
    Denoiser,
    Member,
    Outcome,
    alone,
    asked_of,
    assert_nothing_left,
    backend_of,
    failed,
    joined,
    live,
    opened,
    options,
    there,
    wait_there,
)

MEMBER_DEADLINE_S = 0.4
RANKS = {"member_deadline_s": MEMBER_DEADLINE_S}


@pytest.mark.parametrize("slow", [0, 1])
def test_the_others_finish_without_a_request_that_stands_between_its_walks_and_it_finishes_later(slow: int) -> None:
    async def scenario(member: Member) -> Outcome:
        rank = member.rank.rank

        def on_step(step: int) -> None:
            if (rank, step) == (slow, 1):
                wait_there(member.rank, "the other is done")

        outcome = await member.ask(asked_of(rank), on_step)
        member.announce("the slow one is done" if rank == slow else "the other is done")
        await there(member.rank, "the slow one is done")
        return outcome

    def work(rank: Rank) -> Outcome:
        return live(rank, scenario, backend=backend_of(rank), max_running_requests=1, ranks=RANKS)

    outcomes = run_ranks(2, work, patience_s=20)
    assert [outcome.value for outcome in outcomes] == [alone(asked_of(rank)) for rank in range(2)], outcomes


STANDING_WAVE = WaveSignature((("StandingDenoiser", STEPS),))


class StandingDenoiser(Denoiser):
    """Calls ``before_block`` with the number of each block, before it."""

    before_block: Callable[[int], object] = staticmethod(lambda number: None)

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        x = x + self.condition(prompt)
        for number, block in enumerate(self.transformer_blocks):
            self.before_block(number)
            x = block(x)
        return x


@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("where", [1, 4])
def test_one_that_stands_within_a_walk_fails_all_by_name(slow: int, where: int) -> None:
    """Its slot is in use, and no gather can go past that."""

    def before_block(member: Member) -> Callable[[int], object]:
        def stand(number: int) -> None:
            if number == where:
                for other in {0, 1, 2} - {slow}:
                    wait_there(member.rank, f"rank {other} knows")

        return stand

    async def ask_twice(rank: Rank) -> tuple[Outcome, Outcome]:
        model, outcomes = StandingDenoiser(), [Outcome(), Outcome()]
        try:
            async with opened(rank, model, max_running_requests=1, ranks=RANKS) as member:
                if rank.rank == slow:
                    model.before_block = before_block(member)
                outcomes[0] = await member.ask(asked_of(rank.rank), wave=STANDING_WAVE)
                member.announce(f"rank {rank.rank} knows")
                outcomes[1] = await member.ask(asked_of(rank.rank, 1), wave=STANDING_WAVE)
        except Exception as failure:  # of closing
            assert failed(failure).rank == slow, failure
        return outcomes[0], outcomes[1]

    def work(rank: Rank) -> tuple[Outcome, Outcome]:
        before = joined(rank)
        outcomes = anyio.run(ask_twice, rank, backend=backend_of(rank))
        assert_nothing_left(before)
        return outcomes

    for rank, (outcome, later) in enumerate(run_ranks(3, work, patience_s=30)):
        for each in (outcome, later):
            assert "RankFailedError" in each.errors, (rank, each)
            assert each.rank == slow, (rank, each)
            assert "member_deadline_s is 0.4" in each.text, (rank, each)
            assert repr(asked_of(slow).prompt) in each.text, (rank, each)
        assert MEMBER_DEADLINE_S <= outcome.seconds < 10, (rank, outcome)


def test_a_thread_that_stops_calling_the_model_holds_its_wave_up_no_longer_than_that() -> None:
    def make(rank: Rank, model: Denoiser) -> str | None:
        if rank.rank == 1:
            return asked_of(1).make(model)
        with torch.no_grad():
            model(torch.zeros(2, asked_of(0).embedding().shape[1]), asked_of(0).embedding())
        wait_there(rank, "made")  # alive, and calls no more
        return None

    def open_and_make(rank: Rank) -> str | None:
        given: Any = options(ranks={**RANKS, "default_wave": {"steps": (("Denoiser", STEPS),)}}, max_running_requests=1)
        model = Denoiser()
        with streamflow.offload(model, given, ranks=RankGroups(data_parallel=torch.distributed.group.WORLD)):
            made = make(rank, model)
            if made is not None:
                (rank.folder / "made").touch()
        return made

    def work(rank: Rank) -> str | None:
        before = joined(rank)
        made = open_and_make(rank)
        assert_nothing_left(before)
        return made

    assert run_ranks(2, work, patience_s=20) == [None, alone(asked_of(1))]
