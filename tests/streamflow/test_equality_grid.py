"""Every number of blocks in every window, of blocks five times as large as their neighbours, by both transfers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.corners import CORNERS
from tests.streamflow.kit import largest_block_bytes, stream_and_compare
from tests.streamflow.models import CALLS, Case, blocks_of, mlp_stack

pytestmark = pytest.mark.anyio

TRANSFERS: dict[str, dict[str, Any]] = {
    "auto": {"transfer": "auto"},
    # chunks so small that each block has several, and more threads than chunks at a time
    "staged": {"transfer": "staged", "staging_chunk_bytes": 1024, "packing_threads": 2},
}
GRID = [(num_blocks, window) for num_blocks in range(1, 10) for window in range(1, 5)]


async def check(num_blocks: int, window: int, transfer: str) -> None:
    case = Case("mlp", lambda: mlp_stack(num_blocks), CALLS)
    statistics = await stream_and_compare(case, {"window_blocks": window, **TRANSFERS[transfer]})
    blocks = blocks_of(case.build())
    num_slots = min(window, num_blocks)
    assert statistics.engine.window_bytes == num_slots * largest_block_bytes(blocks)
    assert statistics.engine.num_walks == 2 * len(CALLS)
    assert statistics.engine.streamed_bytes >= statistics.block_bytes
    if num_blocks > window:  # what does not fit into the window comes again in each walk
        assert statistics.engine.num_fetches >= num_blocks + (2 * len(CALLS) - 1) * (num_blocks - window)
        assert statistics.engine.device_peak_bytes < statistics.model_bytes + num_slots * largest_block_bytes(blocks)
    assert statistics.choice.transfer == ("direct" if transfer == "auto" else "staged")


@pytest.mark.parametrize(("num_blocks", "window"), GRID)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_number_of_blocks_in_every_window(num_blocks: int, window: int) -> None:
    await check(num_blocks, window, "auto")


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(("num_blocks", "window"), CORNERS)
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_corners_of_the_grid_by_each_transfer(num_blocks: int, window: int, transfer: str) -> None:
    await check(num_blocks, window, transfer)
