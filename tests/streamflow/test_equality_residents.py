"""Blocks that stay on the device: none, some by count or by bytes, all; exact, within their memory, and said so."""

from __future__ import annotations

import pytest
from torch import nn

from streamflow import OffloadPlan
from tests.streamflow.kit import aligned, largest_block_bytes, stream_and_compare
from tests.streamflow.models import CALLS, CASES, Case, TwoStacks, blocks_of, mlp_stack, seeded

pytestmark = pytest.mark.anyio

CASE = Case("mlp", lambda: mlp_stack(8), CALLS)


def block_bytes() -> list[int]:
    """Image bytes of each block of the case, counted from its tensors."""
    blocks = blocks_of(CASE.build())
    return [largest_block_bytes([block]) for block in blocks]


@pytest.mark.parametrize(
    ("options", "residents"),
    [
        ({}, []),
        ({"resident_blocks": 0}, []),
        ({"resident_blocks": 3}, [1, 4, 6]),
        ({"resident_blocks": 3, "resident_placement": "leading"}, [0, 1, 2]),
        ({"resident_blocks": 7}, [0, 1, 2, 4, 5, 6, 7]),
        ({"resident_bytes": 0}, []),
        ({"resident_bytes": sum(block_bytes()[:3]), "resident_placement": "leading"}, [0, 1, 2]),
        ({"resident_bytes": sum(block_bytes()[:3]) - 1, "resident_placement": "leading"}, [0, 1]),
        ({"resident_blocks": 1, "resident_bytes": 1 << 30}, [4]),
    ],
    ids=str,
)
async def test_residents_are_exact_and_within_their_memory(options: dict[str, object], residents: list[int]) -> None:
    statistics = await stream_and_compare(CASE, options)
    sizes = block_bytes()
    assert statistics.num_resident_blocks == len(residents)
    assert statistics.engine.resident_bytes == sum(sizes[block] for block in residents)
    streamed = [block for block in range(8) if block not in residents]
    assert statistics.engine.window_bytes == min(2, len(streamed)) * max(sizes[block] for block in streamed)
    assert statistics.engine.num_fetches >= len(streamed)


@pytest.mark.parametrize("transfer", ["auto", "staged"])
async def test_with_all_blocks_resident_nothing_streams_and_the_statistics_say_so(transfer: str) -> None:
    statistics = await stream_and_compare(CASE, {"resident_blocks": "all", "transfer": transfer}, streams=False)
    engine = statistics.engine
    assert statistics.num_resident_blocks == statistics.num_blocks == 8
    assert engine.resident_bytes == statistics.block_bytes == sum(block_bytes())
    assert (engine.window_bytes, engine.num_fetches, engine.streamed_bytes) == (0, 0, 0)
    assert engine.num_passes == 6
    assert engine.num_mailbox_waits == 0


async def test_a_byte_budget_for_every_block_makes_all_resident() -> None:
    statistics = await stream_and_compare(CASE, {"resident_bytes": sum(block_bytes())}, streams=False)
    assert statistics.num_resident_blocks == 8


async def test_only_blocks_of_eligible_stacks_become_resident() -> None:
    plan = OffloadPlan(stacks=("double_blocks", "single_blocks"), resident_eligible="single_blocks")
    case = Case("eligible", lambda: seeded(TwoStacks), CALLS, plan)
    statistics = await stream_and_compare(case, {"resident_bytes": 1 << 30})
    blocks = case.build().single_blocks
    assert isinstance(blocks, nn.ModuleList)
    assert statistics.num_resident_blocks == len(blocks)
    assert statistics.engine.resident_bytes == len(blocks) * largest_block_bytes(blocks)


@pytest.mark.parametrize("case", [case for case in CASES if case.streams], ids=str)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_model_is_exact_with_all_blocks_resident(case: Case) -> None:
    statistics = await stream_and_compare(case, {"resident_blocks": "all"}, streams=False)
    assert statistics.engine.resident_bytes == aligned(statistics.block_bytes) > 0
