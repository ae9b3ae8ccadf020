"""Requests of one rank that need room on the device, while others of it wait for the next wave."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

import streamflow
from streamflow.ranks.topology import RankGroups
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.kit import in_worker, sha256_of
from tests.streamflow.pipelines.toys import ToyPipeline, toy_pipeline
from tests.streamflow.ranks.joint import Member, Outcome, backend_of, live, options, outcome_of, there, wait_there

TOKENS = [1, 5, 2]
RESIDENTS = 3
WAVE = WaveSignature((("transformer", 2), ("transformer_2", 2)))


def budget_for(num_experts: int) -> int:
    """Room for the residents of so many experts and the largest component that comes as a whole, exactly."""

    async def main() -> int:
        given = {"device": "cpu", "resident_blocks": RESIDENTS}
        async with streamflow.open_offload(toy_pipeline(experts=2), given, device=CpuDevice()) as offload:
            statistics = offload.statistics()
        moving = {sizes.name: sizes.moving_bytes for sizes in statistics.components}
        whole = max(moving["text_encoder"], moving["vae"])
        return statistics.engine.device_in_use_bytes + num_experts * moving["transformer"] + whole

    return anyio.run(main)


def test_a_request_that_waits_for_the_next_wave_takes_no_room_from_those_in_this_one() -> None:
    """The second request waits at the first expert while the first one goes on to the second."""

    async def scenario(member: Member) -> list[Any]:
        made: list[Any] = [None, None]
        rank = member.rank
        if rank.rank == 1:
            await there(rank, "done")
            return made
        first, second = member.model, ToyPipeline(**member.model.components)

        def between(what: str) -> None:
            if what == "step 1":
                (rank.folder / "under-way").touch()
                wait_there(rank, "second-waits")

        first.between = between

        async def ask(number: int, pipeline: ToyPipeline) -> None:
            request = member.offload.request(wave=WAVE)
            outcome = await outcome_of(request.run(pipeline, TOKENS, num_steps=4, seed=number))
            made[number] = outcome.error or sha256_of(outcome.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, 0, first)
            await there(rank, "under-way")
            with member.offload.observe() as events:
                tasks.start_soon(ask, 1, second)
                async for event in events:
                    if type(event).__name__ == "PassStarted":
                        break
            (rank.folder / "second-waits").touch()
        (rank.folder / "done").touch()
        return made

    def work(rank: Rank) -> object:
        return live(
            rank,
            scenario,
            backend=backend_of(rank),
            build=lambda: toy_pipeline(experts=2),
            max_running_requests=2,
            resident_blocks=RESIDENTS,
            device_budget_bytes=budget,
        )

    budget = in_worker(lambda: budget_for(2))
    made, _ = run_ranks(2, work)
    pipeline = toy_pipeline(experts=2)
    pictures = [in_worker(lambda seed=seed: pipeline(TOKENS, num_steps=4, seed=seed)) for seed in (0, 1)]
    assert made == [sha256_of(picture) for picture in pictures]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_budget_in_which_requests_could_wait_for_each_other_is_refused(num_requests: int) -> None:
    """A byte less than both experts need beside the VAE: enough for a request alone."""

    async def open_and_close(rank: Rank) -> None:
        groups = RankGroups(data_parallel=torch.distributed.group.WORLD)
        given = options(max_running_requests=num_requests, resident_blocks=RESIDENTS, device_budget_bytes=budget)
        async with streamflow.open_offload(toy_pipeline(experts=2), given, ranks=groups, device=CpuDevice()):
            pass

    async def main(rank: Rank) -> Outcome:
        return await outcome_of(open_and_close(rank))

    def work(rank: Rank) -> Outcome:
        rank.join()
        return anyio.run(main, rank, backend=backend_of(rank))

    budget = in_worker(lambda: budget_for(2)) - 1
    for outcome in run_ranks(2, work):
        if num_requests == 1:
            assert outcome.error is None
        else:
            assert outcome.error == "WaveBudgetError"
            assert f"device_budget_bytes={budget:,}" in outcome.text
            assert "max_running_requests=1" in outcome.text
