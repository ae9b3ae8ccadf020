"""The engine is exact in every order that the events allow: 1,000 seeds of the sim device."""

from __future__ import annotations

import anyio
import pytest

from streamflow.stages.testing.trials import OpenTransferFor, draw_trial, run_trial
from streamflow.stages.testing.walker import open_direct, open_staged
from streamflow.stages.walk_sources import ImmediateWalks, SharedWalks

NUM_SEEDS = 1000
NUM_CASES = 10
LOOPS = ("asyncio", "trio")
TRANSFERS: dict[str, OpenTransferFor] = {"direct": open_direct, "staged": open_staged}


def seeds_of(case: int, transfer: str, loop: str) -> range:
    """The seeds of a case; the transfers and the loops share the seeds among them."""
    sharers = [(each_transfer, each_loop) for each_transfer in TRANSFERS for each_loop in LOOPS]
    share = NUM_SEEDS // NUM_CASES // len(sharers)
    first = (case * len(sharers) + sharers.index((transfer, loop))) * share
    return range(first, first + share)


def seeds_of_transfer(transfer: str) -> list[int]:
    return [seed for case in range(NUM_CASES) for loop in LOOPS for seed in seeds_of(case, transfer, loop)]


def test_every_seed_has_its_case() -> None:
    assert sorted(seed for transfer in TRANSFERS for seed in seeds_of_transfer(transfer)) == list(range(NUM_SEEDS))


@pytest.mark.anyio
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("case", range(NUM_CASES))
async def test_all_legal_orders_are_exact(case: int, transfer: str, anyio_backend_name: str) -> None:
    for seed in seeds_of(case, transfer, anyio_backend_name):
        trial = draw_trial(seed)
        with anyio.fail_after(20):
            try:
                await run_trial(trial, TRANSFERS[transfer])
            except BaseException as failure:
                failure.add_note(str(trial))
                raise


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_the_seeds_cover_what_they_should(transfer: str) -> None:
    """The seeds of each transfer reach every number of blocks and window, residents, places and components, skips and
    repeats.
    """
    trials = [draw_trial(seed) for seed in seeds_of_transfer(transfer)]
    combinations = {(len(trial.blocks.images), trial.options.window_slots) for trial in trials}
    assert combinations == {(blocks, window) for blocks in range(1, 10) for window in range(1, 5)}
    assert {trial.options.num_places for trial in trials} == {1, 2, 3, 4}
    assert {len(trial.components) for trial in trials} == {1, 2}
    assert {type(trial.walk_source) for trial in trials} == {ImmediateWalks, SharedWalks}
    assert any(trial.residents for trial in trials)
    assert any(set(trial.residents) == set(trial.blocks.images) for trial in trials)
    visits = [visits for trial in trials for passes in trial.passes for visits in passes]
    assert any(len(set(visited)) < len(visited) for visited in visits)
    assert any(list(visited) != sorted(visited) for visited in visits)
