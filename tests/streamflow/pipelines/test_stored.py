"""Whole pipelines whose components share their weights through the host weight store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import streamflow
from streamflow.host_weights.errors import EntryMissingError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.store.errors import StoreCode
from streamflow.store.reports import StoreOutcome
from tests.streamflow.pipelines.families.family import modules_of
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.kit import ready

pytestmark = pytest.mark.anyio


def options(folder: Path, mode: str) -> dict[str, Any]:
    store = {"root": str(folder), "free_space_headroom_bytes": 0, "free_space_headroom_fraction": 0.0}
    return {"store_mode": mode, "store": store, "poison_freed_slots": True}


async def test_each_component_has_an_entry_and_the_next_replica_finds_them(tmp_path: Path) -> None:
    given = ready(FLUX)
    for mode, outcome in (("preferred", StoreOutcome.PUBLISHED), ("required", StoreOutcome.LOCAL_HIT)):
        device = CpuDevice()
        async with streamflow.open_offload(given.pipeline, options(tmp_path, mode), device=device) as offload:
            await given.check(offload)
            statistics = offload.statistics()
        reports = {component.name: component.store for component in statistics.components}
        assert set(reports) == set(modules_of(given.pipeline))
        assert all(report is not None and report.outcome is outcome and report.remapped for report in reports.values())
        assert statistics.store is not None
        assert statistics.store.outcome is outcome
        assert statistics.engine.streamed_bytes > 0
        assert statistics.engine.device_peak_bytes < statistics.model_bytes
        assert device.memory().in_use == 0
    assert len(list((tmp_path / "entries").iterdir())) == len(modules_of(given.pipeline))


async def test_without_entries_required_fails_and_the_pipeline_is_as_it_was(tmp_path: Path) -> None:
    given = ready(FLUX)
    places = [
        parameter.data_ptr() for module in modules_of(given.pipeline).values() for parameter in module.parameters()
    ]
    with pytest.raises(EntryMissingError):
        async with streamflow.open_offload(given.pipeline, options(tmp_path, "required")):
            raise AssertionError("it was opened")
    found = [
        parameter.data_ptr() for module in modules_of(given.pipeline).values() for parameter in module.parameters()
    ]
    assert found == places


async def test_components_that_share_memory_keep_their_own_tensors(tmp_path: Path) -> None:
    pipeline = FLUX.build()
    first, second = pipeline.text_encoder_2, pipeline.transformer
    shared = nn.Parameter(next(first.parameters()).detach(), requires_grad=False)
    second.register_parameter("borrowed", shared)
    async with streamflow.open_offload(pipeline, options(tmp_path, "preferred")) as offload:
        statistics = offload.statistics()
    reports = {component.name: component.store for component in statistics.components}
    for name in ("text_encoder_2", "transformer"):
        report = reports[name]
        assert report is not None
        assert (report.outcome, report.code) == (StoreOutcome.CANONICAL_FALLBACK, StoreCode.UNSUPPORTED_ALIAS)
    assert statistics.store is not None
    assert statistics.store.outcome is StoreOutcome.CANONICAL_FALLBACK
    vae = reports["vae"]
    assert vae is not None
    assert vae.outcome is StoreOutcome.PUBLISHED
