"""The trace of a whole pipeline: components that move as a whole are in it, and the file is of the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

import streamflow
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.pipelines.toys import toy_pipeline
from tests.streamflow.trace.kit import sound_trace, spans


@pytest.mark.anyio
@pytest.mark.parametrize("transfer", ["direct", "staged"])
async def test_a_component_that_moves_as_a_whole_is_fetched_without_a_block(tmp_path: Path, transfer: str) -> None:
    path, pipeline = tmp_path / "trace.json", toy_pipeline()
    options = {"transfer": transfer, "trace_path": path}
    async with streamflow.open_offload(pipeline, options, device=FarCpuDevice()) as offload:
        await offload.run(pipeline, [1, 2, 3])
        staged_bytes = offload.statistics().staging.staged_peak_bytes  # type: ignore[union-attr]
    trace = sound_trace(path)
    whole = [event for event in spans(trace, "fetch") if event["args"]["block"] is None]
    copied = sum(event["args"]["nbytes"] for event in spans(trace, "copy") if event["args"]["block"] is None)
    assert whole
    assert copied >= staged_bytes > 0
    assert spans(trace, "block")
    if transfer == "staged":
        assert any(event["args"]["block"] is None for event in spans(trace, "pack"))


@pytest.mark.anyio
async def test_what_is_done_with_the_cache_is_in_plain_values(tmp_path: Path) -> None:
    path, pipeline = tmp_path / "trace.json", toy_pipeline()
    async with streamflow.open_offload(pipeline, {"trace_path": path}, device=FarCpuDevice()) as offload:
        await offload.run(pipeline, [1, 2, 3])
    events = (event.get("args", {}) for event in sound_trace(path)["traceEvents"])
    decided = [args["retention"] for args in events if "retention" in args]
    assert decided
    assert all(set(each) >= {"releases", "reason", "reading", "budget"} for each in decided)
