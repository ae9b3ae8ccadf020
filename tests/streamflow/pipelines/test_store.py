"""Pipelines through the host weight store: every component streams, or moves, from an entry that processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.store.errors import RootRefusedError, StoreError
from streamflow.store.reports import StoreOutcome
from tests.streamflow.kit import ModelState, sha256_of
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.kit import ready
from tests.streamflow.pipelines.test_staged import TOKENS, expected
from tests.streamflow.pipelines.toys import toy_pipeline

pytestmark = pytest.mark.anyio


def options(folder: Path, mode: str = "preferred", **more: Any) -> dict[str, Any]:
    store = {"root": str(folder), "free_space_headroom_bytes": 0, "free_space_headroom_fraction": 0.0}
    return {"store_mode": mode, "store": store, "poison_freed_slots": True, **more}


def mapped_bytes(folder: Path) -> int:
    """What the process has mapped of files in the folder."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            found += end - start
    return found


@pytest.mark.parametrize("more", [{}, {"resident_blocks": 1, "components": {"vae": False}}], ids=str)
async def test_every_component_is_published_once_and_then_found(tmp_path: Path, more: dict[str, Any]) -> None:
    outcomes = []
    for _ in range(2):
        pipeline = toy_pipeline(experts=2)
        resident = expected(pipeline)
        async with streamflow.open_offload(pipeline, options(tmp_path, **more), device=CpuDevice()) as offload:
            for _ in range(2):
                assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
            report = offload.statistics().store
            assert report is not None
            outcomes.append(report.outcome)
            assert offload.statistics().choice.source == "artifact"
            assert mapped_bytes(tmp_path) >= offload.statistics().model_bytes
        assert expected(pipeline) == resident
    assert outcomes == [StoreOutcome.PUBLISHED, StoreOutcome.LOCAL_HIT]


async def test_a_real_pipeline_streams_from_the_store(tmp_path: Path) -> None:
    given = ready(FLUX)
    async with streamflow.open_offload(given.pipeline, options(tmp_path), device=CpuDevice()) as offload:
        await given.check(offload)
        assert offload.statistics().choice.source == "artifact"


async def test_a_store_that_must_have_it_and_does_not_is_told_and_the_pipeline_stays_as_it_was(tmp_path: Path) -> None:
    pipeline = toy_pipeline()
    before = {name: ModelState.of(module) for name, module in pipeline.components.items()}
    with pytest.raises(StoreError):
        async with streamflow.open_offload(pipeline, options(tmp_path, "required"), device=CpuDevice()):
            pytest.fail("it opened")
    for name, module in pipeline.components.items():
        before[name].assert_unchanged(module)


async def test_a_store_that_is_refused_leaves_the_pipeline_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    with pytest.raises(RootRefusedError, match="is not a folder"):
        async with streamflow.open_offload(pipeline, options(tmp_path / "file"), device=CpuDevice()):
            pytest.fail("it opened")
    assert expected(pipeline) == resident
