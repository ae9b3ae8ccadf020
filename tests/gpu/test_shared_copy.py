"""Ranks that share one host copy on a real CUDA device: page-locked in each, byte-equal, nothing left pinned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from streamflow.stages.devices.cuda import CudaDevice
from tests.gpu.test_cuda_equality import digest, make, walks
from tests.streamflow.ranks.agreeing import AgreeingRank, AgreeingRanks, on_ranks
from tests.streamflow.ranks.kit import copies_left, opened, raise_first

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]


@pytest.mark.parametrize("transfer", ["direct", "staged"])
async def test_ranks_stream_from_one_copy(transfer: str) -> None:
    inputs = torch.randn(64, 16, device="cuda")

    async def work(rank: AgreeingRank) -> Any:
        model = make(6)
        resident = copy.deepcopy(model).cuda()
        expected = [digest(output) for output in walks(resident, inputs)]
        async with opened(model, rank, {"device": "cuda", "transfer": transfer}, CudaDevice()) as (offload, source):
            found = [digest(output) for output in await offload.run(walks, model, inputs)]
            statistics = offload.statistics()
            locked = [
                run.is_pinned() for image in source.images.values() for piece in image.pieces for run in piece.runs
            ]
            await rank.agree("all have run", None)
        assert found == expected
        assert [digest(output) for output in walks(model.cuda(), inputs)] == expected
        return statistics, locked

    for statistics, locked in raise_first(await on_ranks(AgreeingRanks(2), work)):
        assert statistics.choice.transfer == transfer
        assert (statistics.registration.registered_bytes >= statistics.block_bytes) == (transfer == "direct")
        assert all(locked)
        assert bool(locked) == (transfer == "direct")
    assert copies_left() == []
