"""Whole pipelines of every family give the bytes of the resident ones, within their memory, and stay as they were."""

from __future__ import annotations

import pytest

from streamflow.pipelines.policy import Behaviour
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.kit import sha256_of
from tests.streamflow.pipelines.document import documented_rows, table_row
from tests.streamflow.pipelines.families.all import FAMILIES
from tests.streamflow.pipelines.families.family import Family
from tests.streamflow.pipelines.kit import always_bytes, open_ready, ready

pytestmark = pytest.mark.anyio

each_family = pytest.mark.parametrize(
    ("family", "anyio_backend"),
    [(family, ("asyncio", "trio")[number % 2]) for number, family in enumerate(FAMILIES)],
    ids=str,
)


@each_family
async def test_a_pipeline_gives_the_resident_latents_and_pictures(family: Family) -> None:
    given = ready(family, num_seeds=2)
    async with open_ready(given) as offload:
        for seed in (0, 1):
            await given.check(offload, seed)
            assert sha256_of(await offload.run(family.latents, given.pipeline, seed)) == given.latents[seed]
        statistics = offload.statistics()
    assert {sizes.name: sizes.behaviour for sizes in statistics.components} == {
        **dict.fromkeys(family.streamed, Behaviour.STREAMED),
        **dict.fromkeys(family.staged, Behaviour.STAGED),
    }
    streamed = {sizes.name: sizes.num_blocks for sizes in statistics.components if sizes.behaviour == "streamed"}
    assert streamed == family.streamed
    assert statistics.engine.streamed_bytes > 0
    assert statistics.engine.device_peak_bytes < statistics.model_bytes
    row = table_row(family, statistics, await always_bytes(given))
    assert row in documented_rows(), f"docs/pipelines.md lacks this row, or has it with other numbers:\n{row}"


@each_family
async def test_with_the_least_budget_and_resident_blocks(family: Family) -> None:
    """Every component alone beside the window, and no two together."""
    given = ready(family)
    async with open_ready(given, {"resident_blocks": 1}) as offload:
        sizes = offload.statistics().components
        window = offload.statistics().engine.window_bytes
    budget = window + max(component.moving_bytes for component in sizes)
    device = CpuDevice(memory_limit_bytes=budget)
    async with open_ready(given, {"resident_blocks": 1, "device_budget_bytes": budget}, device) as offload:
        await given.check(offload)
        assert all(s.num_resident_blocks == (s.name in family.streamed) for s in offload.statistics().components)
    assert device.memory().peak <= budget
