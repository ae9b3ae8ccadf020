"""A trace is written on closing, on a failure and on demand, is whole, and costs nothing where nobody asked for it."""

from __future__ import annotations

import gzip
import os
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import EngineBrokenError, SourceReadError
from streamflow.stages.images import MemoryPiece
from streamflow.trace.errors import TraceOffError, TraceWriteError
from streamflow.trace.file import write_json
from tests.streamflow.trace.kit import NBYTES, NUM_BLOCKS, small_model, sound_trace, spans, traced_run, walk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.mark.anyio
@pytest.mark.parametrize("transfer", ["direct", "staged"])
async def test_a_trace_tells_all_that_happened(path: Path, transfer: str) -> None:
    trace = await traced_run(path, transfer=transfer)
    metadata = trace["streamflow"]
    assert metadata["num_dropped_events"] == metadata["num_unfinished_spans"] == 0
    assert metadata["versions"]["streamflow"] == streamflow.__version__
    assert metadata["config"]["transfer"] == metadata["transfer"]["transfer"] == transfer
    (engine,) = metadata["engines"]
    assert [block["name"] for block in engine["blocks"]] == [f"SleepingModel.blocks.{i}" for i in range(NUM_BLOCKS)]
    blocks = spans(trace, "block")
    assert [event["args"]["block"] for event in blocks] == 2 * list(range(NUM_BLOCKS))
    copies, fetches = spans(trace, "copy"), spans(trace, "slot")
    assert sum(copy["args"]["nbytes"] for copy in copies) == sum(fetch["args"]["nbytes"] for fetch in fetches)
    assert {fetch["args"]["fetch"] for fetch in fetches} >= {block["args"]["fetch"] for block in blocks}
    assert [event["args"]["walk_id"] for event in spans(trace, "walk")] == [1, 2]
    assert len(spans(trace, "pass")) == 2
    packed = sum(event["args"]["nbytes"] for event in spans(trace, "pack"))
    assert packed == (sum(fetch["args"]["nbytes"] for fetch in fetches) if transfer == "staged" else 0)


@pytest.mark.anyio
async def test_a_block_runs_after_its_copy_and_each_fetch_flows_to_its_first_run(path: Path) -> None:
    trace = await traced_run(path, device=CpuDevice(link_bytes_per_s=200_000))
    copied = {copy["args"]["fetch"]: copy["ts"] + copy["dur"] for copy in spans(trace, "copy")}
    blocks = spans(trace, "block")
    assert all(block["ts"] >= copied[block["args"]["fetch"]] for block in blocks)
    assert all(copy["dur"] >= NBYTES / 200_000 * 1e6 for copy in spans(trace, "copy"))
    flows = Counter(event["ph"] for event in trace["traceEvents"] if event.get("cat") == "flow")
    assert flows["f"] == len({block["args"]["fetch"] for block in blocks})
    assert flows["s"] == flows["t"] == len(copied)


@pytest.mark.anyio
async def test_residents_are_in_it(path: Path) -> None:
    trace = await traced_run(path, resident_blocks="all")
    assert spans(trace, "slot") == []
    assert len(spans(trace, "block")) == 2 * NUM_BLOCKS
    assert {event["args"]["fetch"] for event in spans(trace, "block")} == {None}
    assert len(spans(trace, "copy")) == NUM_BLOCKS


@pytest.mark.anyio
async def test_the_oldest_events_are_dropped_and_counted(path: Path) -> None:
    trace = await traced_run(path, trace_events=20)
    assert trace["streamflow"]["num_dropped_events"] > 20
    whole = await traced_run(path)
    assert trace["streamflow"]["capacity_events"] == 20
    assert len(trace["traceEvents"]) < len(whole["traceEvents"])


@pytest.mark.anyio
async def test_a_name_that_ends_with_gz_compresses(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    trace = await traced_run(path)
    assert gzip.decompress(path.read_bytes()).startswith(b'{"displayTimeUnit"')
    assert len(spans(trace, "block")) == 2 * NUM_BLOCKS


@pytest.mark.anyio
async def test_a_trace_on_demand_also_after_closing(tmp_path: Path) -> None:
    model = small_model()
    async with streamflow.open_offload(model, {"device": "cpu", "trace_events": 1000}) as offload:
        await offload.run(walk, model)
        await offload.write_trace(tmp_path / "first.json")
        await offload.run(walk, model)
    await offload.write_trace(tmp_path / "second.json")
    assert len(spans(sound_trace(tmp_path / "first.json"), "block")) == NUM_BLOCKS
    assert len(spans(sound_trace(tmp_path / "second.json"), "block")) == 2 * NUM_BLOCKS
    assert sorted(os.listdir(tmp_path)) == ["first.json", "second.json"]


@pytest.mark.anyio
async def test_nothing_is_recorded_where_nobody_asked(tmp_path: Path) -> None:
    model = small_model()
    async with streamflow.open_offload(model, {"device": "cpu"}) as offload:
        assert not offload._engine.broadcast.is_observed
        assert {place.watch for place in offload._engine.places} == {None}
        with pytest.raises(TraceOffError, match="trace_path"):
            await offload.write_trace(tmp_path / "trace.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.anyio
async def test_a_failure_is_written_before_the_offload_closes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MemoryPiece, address: int, start: int, nbytes: int) -> None:
        raise SourceReadError("a test", 0, 1, 0, "the test wants it so")

    model = small_model()
    async with streamflow.open_offload(
        model, {"device": "cpu", "trace_path": path, "transfer": "staged", "window_blocks": 1}
    ) as offload:
        await offload.run(walk, model)
        monkeypatch.setattr(MemoryPiece, "read_into", fail)
        with pytest.raises(EngineBrokenError):
            await offload.run(walk, model)
        with anyio.fail_after(30):
            while not await anyio.Path(path).exists():
                await anyio.lowlevel.checkpoint()
        events = [event for event in sound_trace(path)["traceEvents"] if event["name"] == "EngineFailed"]
        assert ["the test wants it so" in event["args"]["error"] for event in events] == [True]
    assert spans(sound_trace(path), "pass")


@pytest.mark.anyio
async def test_a_body_that_fails_leaves_a_trace_and_its_own_error(path: Path) -> None:
    model = small_model()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - what leaves the context is the point
        async with streamflow.open_offload(model, {"device": "cpu", "trace_path": path}) as offload:
            await offload.run(walk, model)
            raise ZeroDivisionError
    assert len(spans(sound_trace(path), "block")) == NUM_BLOCKS


@pytest.mark.anyio
async def test_a_cancelled_offload_leaves_a_trace(path: Path) -> None:
    model = small_model()
    with anyio.CancelScope() as scope:
        async with streamflow.open_offload(model, {"device": "cpu", "trace_path": path}) as offload:
            await offload.run(walk, model)
            scope.cancel()
            await anyio.sleep_forever()
    assert len(spans(sound_trace(path), "block")) == NUM_BLOCKS


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["missing/trace.json", "."])
async def test_a_place_that_cannot_be_written_is_told_before_anything_is_touched(tmp_path: Path, where: str) -> None:
    model = small_model()
    with pytest.raises(TraceWriteError, match="could not be written"):
        async with streamflow.open_offload(model, {"device": "cpu", "trace_path": tmp_path / where}):
            pytest.fail("it was opened")
    walk(model)


@pytest.mark.anyio
async def test_a_folder_that_goes_away_is_an_error_on_closing_and_a_note_on_that_of_the_body(tmp_path: Path) -> None:
    model, folder = small_model(), tmp_path / "folder"
    config = {"device": "cpu", "trace_path": folder / "trace.json"}
    folder.mkdir()
    with pytest.raises(TraceWriteError) as caught:
        async with streamflow.open_offload(model, config):
            folder.rmdir()
    assert isinstance(caught.value, OSError)
    folder.mkdir()
    with pytest.raises(ZeroDivisionError) as failed:  # noqa: PT012 - what leaves the context is the point
        async with streamflow.open_offload(model, config):
            folder.rmdir()
            raise ZeroDivisionError
    assert ["could not be written" in note for note in failed.value.__notes__] == [True]


@pytest.mark.anyio
async def test_a_file_that_was_there_stays_if_the_new_one_cannot_be_written(path: Path) -> None:
    model = small_model()
    async with streamflow.open_offload(model, {"device": "cpu", "trace_events": 100}) as offload:
        await offload.write_trace(path)
        before = await anyio.Path(path).read_bytes()
        offload._tracing.describe(config={"not": {"plain", "values"}})
        with pytest.raises(TypeError):
            await offload.write_trace(path)
    assert await anyio.Path(path).read_bytes() == before
    assert os.listdir(path.parent) == ["trace.json"]


def test_what_is_no_file_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        write_json(pipe, {"traceEvents": []})
        assert read.result(timeout=30) == b'{"traceEvents":[]}'
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_json(Path(os.devnull), {"traceEvents": []})
    assert not Path(os.devnull).is_file()
