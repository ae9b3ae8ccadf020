"""Which ranks share an entry: replicas do, tensor-parallel ranks do not, and another split of sequences is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import streamflow
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.store.reports import StoreOutcome, StoreReport
from tests.streamflow.host_weights.kit import CASE, Stored, report_of
from tests.streamflow.models import WIDTH, Mlp, Stack, seeded

pytestmark = pytest.mark.anyio


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    found = Stored(tmp_path)
    found.save()
    return found


async def opened_by(stored: Stored, load: Any = None, **topology: Any) -> StoreReport:
    """What the store did for a process of this topology."""
    inputs = LoadInputs(producer_abi="shards 1")
    config = stored.config("preferred", topology=topology)
    async with streamflow.open_streamed(
        CASE.build, stored.checkpoint, config, load=load or stored.load, inputs=inputs
    ) as (offload, _):
        return report_of(offload)


def shard_of(rank: int) -> Any:
    """A loader of the part of one rank: other values for each."""

    def load(skeleton: nn.Module) -> nn.Module:
        return seeded(lambda: Stack(Mlp(5 * WIDTH if index % 2 == 0 else WIDTH) for index in range(6)), seed=rank)

    return load


async def test_tensor_parallel_ranks_have_an_entry_each(stored: Stored) -> None:
    reports = [
        await opened_by(stored, shard_of(rank), tensor_parallel_size=2, tensor_parallel_rank=rank) for rank in (0, 1, 0)
    ]
    hit = StoreOutcome.LOCAL_HIT
    assert [report.outcome for report in reports[:2]] == [StoreOutcome.PUBLISHED] * 2
    assert len({report.source_id for report in reports}) == len({report.content_id for report in reports}) == 2
    assert len(stored.entries) == 2
    assert (reports[0].source_id, reports[0].content_id) == (reports[2].source_id, reports[2].content_id)
    assert reports[2].outcome is hit


async def test_data_parallel_replicas_share_one(stored: Stored) -> None:
    """Nothing says which replica a process is: it changes no byte."""
    first, second = await opened_by(stored), await opened_by(stored)
    assert (first.outcome, second.outcome) == (StoreOutcome.PUBLISHED, StoreOutcome.LOCAL_HIT)
    assert first.source_id == second.source_id
    assert len(stored.entries) == 1


async def test_another_sequence_split_is_another_source(stored: Stored) -> None:
    one, two = await opened_by(stored), await opened_by(stored, sequence_parallel_size=2)
    assert (one.outcome, two.outcome) == (StoreOutcome.PUBLISHED, StoreOutcome.PUBLISHED)
    assert one.source_id != two.source_id
    again = await opened_by(stored, sequence_parallel_size=2)
    assert (again.outcome, again.source_id) == (StoreOutcome.LOCAL_HIT, two.source_id)
