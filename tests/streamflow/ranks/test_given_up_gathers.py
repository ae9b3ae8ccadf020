"""A rank that waits in a gather while its offload opens, and another that will not come."""

from __future__ import annotations

import anyio
import pytest
import torch

from streamflow.hardware import open_hardware
from streamflow.opening import effective_config
from streamflow.ranks.opening import Ranks
from streamflow.ranks.topology import RankGroups
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.signals import LoopEvent
from tests.ranks import Rank, run_ranks
from tests.streamflow.ranks.joint import backend_of, joined, options, outcome_of


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
@pytest.mark.parametrize("who", [0, 1])
def test_gathers_are_given_up_where_a_rank_leaves_before_all_have_opened(who: int, how: str) -> None:
    """On an accelerator nothing else would end them: what is queued there has no timeout."""

    async def wait(ranks: Ranks) -> str:
        given_up, abort = LoopEvent(), ranks.communicator.abort

        def note() -> None:
            given_up.set()
            abort()

        ranks.communicator.abort = note  # type: ignore[method-assign]
        with anyio.fail_after(10):
            await given_up.wait()
        return "given up"

    async def open_and_stay(rank: Rank) -> str:
        groups = RankGroups(data_parallel=torch.distributed.group.WORLD)
        with anyio.CancelScope() as scope:
            async with open_hardware(CpuDevice(), groups, effective_config(options())) as (hardware, _):
                assert hardware.ranks is not None
                if rank.rank != who:
                    return await wait(hardware.ranks)
                if how == "fails":
                    raise OSError("no such file")
                scope.cancel()
                await anyio.sleep_forever()
        return "cancelled"

    def work(rank: Rank) -> object:
        joined(rank)
        return anyio.run(outcome_of_opening, rank, backend=backend_of(rank))

    async def outcome_of_opening(rank: Rank) -> str | None:
        outcome = await outcome_of(open_and_stay(rank))
        return outcome.error or outcome.value

    answers = run_ranks(2, work)
    assert answers[who] == ("OSError" if how == "fails" else "cancelled")
    assert answers[1 - who] == "given up"
