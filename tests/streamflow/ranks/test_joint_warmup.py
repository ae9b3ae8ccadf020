"""Warm-up where ranks gather: its passes are waves of their own, and nobody's first request meets one."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

import streamflow
from streamflow.ranks.topology import RankGroups
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, forked_ranks, run_ranks
from tests.streamflow.kit import in_worker, sha256_of
from tests.streamflow.pipelines.toys import toy_pipeline
from tests.streamflow.ranks.joint import Denoiser, assert_nothing_left, backend_of, joined, options, outcome_of

TOKENS = [1, 5, 2]
WAVE = WaveSignature((("transformer", 2), ("transformer_2", 3)))


@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all", "one rank"])
def test_a_warm_up_walks_in_waves_before_the_first_request(who: tuple[int, ...]) -> None:
    """Three steps by two experts; the ranks that do not warm up open no earlier, and their requests are not refused."""

    async def main(rank: Rank) -> tuple[str, int]:
        pipeline = toy_pipeline(experts=2)
        groups = RankGroups(data_parallel=torch.distributed.group.WORLD)

        def warm_up() -> None:
            rank.say("warm-up")
            pipeline(TOKENS, num_steps=3)

        given: Any = options(max_running_requests=2, stateful_modules=None, ranks={"wave_window_s": 0.1})
        opening = streamflow.open_offload(pipeline, given, ranks=groups, warmup=warm_up if rank.rank in who else None)
        async with opening as offload:
            assert offload.statistics().engine.num_passes == 0
            request = offload.request(wave=WAVE)
            outcome = await outcome_of(request.run(pipeline, TOKENS, num_steps=5, seed=rank.rank))
            num_walks = offload.statistics().engine.num_walks
        return outcome.error or sha256_of(outcome.value), num_walks

    def work(rank: Rank) -> object:
        before = joined(rank)
        told = anyio.run(main, rank, backend=backend_of(rank))
        assert_nothing_left(before)
        return told

    with forked_ranks(2, work) as ranks:
        answers = ranks.answers()
        assert [ranks.said(rank) for rank in range(2)] == [["warm-up"] if rank in who else [] for rank in range(2)]
    pipeline = toy_pipeline(experts=2)
    pictures = [sha256_of(in_worker(lambda seed=seed: pipeline(TOKENS, num_steps=5, seed=seed))) for seed in (0, 1)]
    assert [picture for picture, _ in answers] == pictures


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_whose_warm_up_fails_opens_on_no_rank(who: int) -> None:
    async def main(rank: Rank) -> tuple[str | None, int | None]:
        groups = RankGroups(data_parallel=torch.distributed.group.WORLD)

        def warm_up() -> None:
            raise OSError("no such picture")

        async def open_and_close() -> None:
            opening = streamflow.open_offload(
                Denoiser(), options(), ranks=groups, warmup=warm_up if rank.rank == who else None
            )
            async with opening:
                pass

        outcome = await outcome_of(open_and_close())
        return outcome.error, outcome.rank

    def work(rank: Rank) -> object:
        before = joined(rank)
        told = anyio.run(main, rank, backend=backend_of(rank))
        assert_nothing_left(before)
        return told

    answers = run_ranks(2, work)
    assert answers[who][0] == "WarmUpError"
    assert answers[1 - who] == ("RankFailedError", who)
