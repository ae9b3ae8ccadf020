"""Requests of one rank in one wave, over components that let one request in at a time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.kit import in_worker, sha256_of
from tests.streamflow.pipelines.toys import toy_pipeline
from tests.streamflow.ranks.joint import Member, Outcome, backend_of, live, outcome_of

TOKENS = [1, 5, 2]


@pytest.mark.parametrize("stateful", [None, ("transformer_2",)], ids=["looked for", "named"])
def test_requests_of_a_rank_walk_by_an_open_expert_and_by_one_that_is_not(stateful: tuple[str, ...] | None) -> None:
    """The first request opens the gate of the first expert: two later ones of each rank come to the second together."""
    wave = WaveSignature((("transformer", 2), ("transformer_2", 2)))

    async def make(member: Member, seed: int, num_steps: int, wave: WaveSignature) -> Outcome:
        request = member.offload.request(wave=wave)
        return await outcome_of(request.run(member.model, TOKENS, num_steps=num_steps, seed=seed))

    async def scenario(member: Member) -> dict[int, Any]:
        made: dict[int, Any] = {}

        async def ask(seed: int) -> None:
            made[seed] = await make(member, seed, 4, wave)

        await make(member, 0, 2, WaveSignature((("transformer", 2),)))
        async with anyio.create_task_group() as tasks:
            for number in (1, 2):
                tasks.start_soon(ask, 10 * member.rank.rank + number)
        return {seed: outcome.error or sha256_of(outcome.value) for seed, outcome in made.items()}

    def work(rank: Rank) -> object:
        return live(
            rank,
            scenario,
            backend=backend_of(rank),
            build=lambda: toy_pipeline(experts=2),
            max_running_requests=2,
            stateful_modules=stateful,
        )

    answers = run_ranks(2, work)
    pipeline = toy_pipeline(experts=2)
    for rank, made in enumerate(answers):
        for number in (1, 2):
            seed = 10 * rank + number
            picture = in_worker(lambda seed=seed: pipeline(TOKENS, num_steps=4, seed=seed))
            assert made[seed] == sha256_of(picture)
