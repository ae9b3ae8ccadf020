"""The event log: complete, in order, of one moment with its statistics, and honest about what it lost."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from streamflow import open_offload
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.events import BlockLeft, FetchFailed, SlowDeviceCall, WalkStarted
from streamflow.tools.demo import event_log
from streamflow.tools.demo.checkpoint import build_empty_model
from streamflow.tools.demo.event_log import describe, open_event_log
from streamflow.tools.demo.model import DigitTransformer, DigitTransformerConfig
from streamflow.tools.demo.sampling import sample

pytestmark = pytest.mark.anyio


@pytest.fixture
def small_model(small_config: DigitTransformerConfig) -> DigitTransformer:
    model = build_empty_model(small_config).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_the_log_and_its_statistics_are_of_one_moment(small_model: DigitTransformer, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with open_offload(small_model, {"device": "cpu", "window_blocks": 1}) as offload:
        async with open_event_log(offload, path) as log:
            await offload.run(sample, small_model, [1, 2], seed=0, num_steps=5)
        events, engine = read_log(path), log.statistics.engine
    kinds = Counter(event["kind"] for event in events)
    assert kinds == log.counts
    assert log.num_lost == 0
    assert kinds["PassStarted"] == kinds["PassEnded"] == engine.num_passes == 5
    assert kinds["WalkStarted"] == engine.num_walks == 5
    assert kinds["FetchStarted"] == engine.num_fetches >= 10
    assert (
        sum(event["nbytes"] for event in events if event["kind"] == "FetchStarted")
        == log.fetched_bytes
        == engine.streamed_bytes
        > 0
    )
    times = [event["time_s"] for event in events]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 60


async def test_a_log_that_was_opened_late_has_lost_nothing(small_model: DigitTransformer, tmp_path: Path) -> None:
    async with open_offload(small_model, {"device": "cpu"}) as offload:
        await offload.run(sample, small_model, [1], seed=0, num_steps=3)
        async with open_event_log(offload, tmp_path / "events.jsonl") as log:
            await offload.run(sample, small_model, [1], seed=0, num_steps=2)
    assert (log.counts["PassStarted"], log.statistics.engine.num_passes, log.num_lost) == (2, 5, 0)


async def test_batches_are_written_meanwhile(
    small_model: DigitTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "BATCH_LINES", 3)
    path = tmp_path / "events.jsonl"
    async with (
        open_offload(small_model, {"device": "cpu", "window_blocks": 1}) as offload,
        open_event_log(offload, path) as log,
    ):
        await offload.run(sample, small_model, [1], seed=0, num_steps=4)
    assert log.num_lost == 0
    assert len(read_log(path)) == log.counts.total() > 9


async def test_lost_events_are_counted(
    small_model: DigitTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "CAPACITY_EVENTS", 1)
    monkeypatch.setattr(event_log, "LAST_EVENTS_S", 0.1)  # the end of a pass may be among the lost ones
    path = tmp_path / "events.jsonl"
    async with (
        open_offload(small_model, {"device": "cpu", "window_blocks": 1}) as offload,
        open_event_log(offload, path) as log,
    ):
        await offload.run(sample, small_model, [1], seed=0, num_steps=3)
    assert log.num_lost > 0
    assert len(read_log(path)) == log.counts.total()


async def test_a_failure_inside_comes_out_as_it_is(small_model: DigitTransformer, tmp_path: Path) -> None:
    async with open_offload(small_model, {"device": "cpu"}) as offload:
        with pytest.raises(ZeroDivisionError):
            async with open_event_log(offload, tmp_path / "events.jsonl"):
                await offload.run(lambda: 1 // 0)
        await offload.run(sample, small_model, [1], seed=0, num_steps=1)


async def test_a_cancelled_log_ends(small_model: DigitTransformer, tmp_path: Path) -> None:
    device = CpuDevice(link_bytes_per_s=40_000)
    async with open_offload(small_model, {"device": "cpu"}, device=device) as offload:
        with anyio.move_on_after(0.1) as scope:
            async with open_event_log(offload, tmp_path / "events.jsonl"):
                await offload.run(sample, small_model, [1], seed=0, num_steps=1)
        assert scope.cancelled_caught


async def test_a_file_that_cannot_be_written_is_an_error(small_model: DigitTransformer, tmp_path: Path) -> None:
    async with open_offload(small_model, {"device": "cpu"}) as offload:
        with pytest.raises(FileNotFoundError):
            async with open_event_log(offload, tmp_path / "no folder" / "events.jsonl"):
                await offload.run(sample, small_model, [1], seed=0, num_steps=1)


@pytest.mark.parametrize("batch", [1, 10_000])
async def test_a_full_disk_is_an_error_when_the_log_closes(
    small_model: DigitTransformer, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(event_log, "BATCH_LINES", batch)
    async with open_offload(small_model, {"device": "cpu"}) as offload:
        with pytest.raises(OSError, match="No space left"):
            async with open_event_log(offload, Path("/dev/full")):
                await offload.run(sample, small_model, [1], seed=0, num_steps=2)


def test_every_event_is_plain_values() -> None:
    event = CpuDevice().open_compute_stream("compute").record()
    assert describe(BlockLeft(3, 1, (0,), event), 0.25) == {
        "time_s": 0.25,
        "kind": "BlockLeft",
        "pass_id": 3,
        "block": 1,
        "passed_by": (0,),
    }
    failed = describe(FetchFailed(2, OSError("gone")), math.pi)
    assert (failed["error"], failed["time_s"]) == ("OSError('gone')", 3.141593)
    for other in (SlowDeviceCall("fetch", 0.5), WalkStarted(1, "DigitTransformer", (1, 2))):
        assert json.loads(json.dumps(describe(other, 0.0)))["kind"] == type(other).__name__
