"""Two models in each process, both gathered by the same ranks, and used at once."""

from __future__ import annotations

import anyio

from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.ranks.joint import (
    STEPS,
    Denoiser,
    Outcome,
    Seen,
    alone,
    asked_of,
    assert_nothing_left,
    backend_of,
    joined,
    opened,
    outcome_of,
)

NUM_REQUESTS = 3


class Refiner(Denoiser):
    """Another model: of other blocks."""

    def __init__(self) -> None:
        super().__init__((16, 96, 16))


def test_requests_of_two_models_interleave_without_waiting_for_each_other() -> None:
    """On each rank the two are asked in another order: no rank waits in one for what another one does in the other."""

    async def main(rank: Rank) -> dict[str, tuple[list[Outcome], Seen]]:
        told: dict[str, tuple[list[Outcome], Seen]] = {}
        changes = {"max_running_requests": 1}
        async with opened(rank, Denoiser(), **changes) as one, opened(rank, Refiner(), **changes) as other:

            async def use(name: str) -> None:
                member = one if name == "Denoiser" else other
                wave, outcomes = WaveSignature(((name, STEPS),)), []
                for number in range(NUM_REQUESTS):
                    request = member.offload.request(wave=wave)
                    outcomes.append(await outcome_of(request.run(asked_of(rank.rank, number).make, member.model)))
                await member.meet(f"done with {name}")
                told[name] = outcomes, member.seen()

            async with anyio.create_task_group() as tasks:
                for name in ["Denoiser", "Refiner"][:: 1 if rank.rank else -1]:
                    tasks.start_soon(use, name)
        return told

    def work(rank: Rank) -> object:
        before = joined(rank)
        told = anyio.run(main, rank, backend=backend_of(rank))
        assert_nothing_left(before)
        return told

    answers = run_ranks(2, work)
    for rank, told in enumerate(answers):
        for name, build in {"Denoiser": Denoiser, "Refiner": Refiner}.items():
            outcomes, seen = told[name]
            expected = [alone(asked_of(rank, number), build) for number in range(NUM_REQUESTS)]
            assert [outcome.value for outcome in outcomes] == expected, (name, outcomes)
            assert (seen.transfer, seen.num_walks) == ("gathered", NUM_REQUESTS * STEPS)
