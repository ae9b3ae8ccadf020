"""The states of an offload, and what it says about itself in each."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from torch import nn

import streamflow
from streamflow import Offload
from streamflow.runtime.offload import State
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import EngineBrokenError, EngineClosedError, SourceReadError
from streamflow.stages.events import EngineFailed, ObservedEvent
from streamflow.stages.images import MemoryPiece
from streamflow.weights.pieces import FilePiece
from tests.streamflow.kit import save_checkpoint, streamflow_threads
from tests.streamflow.models import seeded
from tests.streamflow.runtime.kit import ONE_AT_A_TIME, Script, Scripted, Stops, Subject, make_subject, until, wait_for

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

NUM_BLOCKS = 4
DIRECT: dict[str, Any] = {"window_blocks": 1}
STAGED: dict[str, Any] = {"window_blocks": 1, "transfer": "staged", "packing_threads": 1}
with_each_transfer = pytest.mark.parametrize("options", [DIRECT, STAGED], ids=["direct", "staged"])


def check_says(offload: Offload, state: State, num_running: int = 0, num_waiting: int = 0) -> None:
    """Fail unless state, statistics and repr agree on these."""
    statistics = offload.statistics()
    assert offload.state == statistics.state == state
    assert (statistics.num_running, statistics.num_waiting) == (num_running, num_waiting)
    assert repr(offload).startswith(
        f"<Offload {state}: {NUM_BLOCKS} of {NUM_BLOCKS} blocks streamed to cpu through 1 slot"
    )
    assert f"{num_running} running, {num_waiting} waiting" in repr(offload)


async def test_from_ready_through_draining_to_closed(stops: Stops) -> None:
    subject, in_block = make_subject(NUM_BLOCKS), threading.Event()
    seen: list[State] = []

    def see() -> None:
        check_says(offload, "draining", num_running=1)
        seen.append(offload.state)

    def stay(index: int) -> None:
        in_block.set()
        wait_for(stops.told)

    async def refused(offload: Offload) -> None:
        with pytest.raises(EngineClosedError):
            await offload.run(subject.forward)

    async with anyio.create_task_group() as tasks, streamflow.open_offload(subject.model, DIRECT) as offload:
        check_says(offload, "ready")
        await subject.check_next(offload)
        check_says(offload, "ready")
        subject.script.inside = stay
        tasks.start_soon(refused, offload)
        await until(in_block)
        check_says(offload, "ready", num_running=1)
        stops.action = see
    assert seen == ["draining"]
    check_says(offload, "closed")
    with pytest.raises(EngineClosedError, match="open a new one"):
        await offload.run(subject.forward)
    assert offload.statistics().engine.device_in_use_bytes == 0


async def test_what_was_counted_is_there_after_closing() -> None:
    subject = make_subject(NUM_BLOCKS)
    async with streamflow.open_offload(subject.model, DIRECT) as offload:
        await subject.check_next(offload)
        before = offload.statistics().engine
    after = offload.statistics().engine
    assert (after.num_walks, after.num_passes, after.streamed_bytes) == (1, 1, before.streamed_bytes)
    assert after.device_peak_bytes == before.device_peak_bytes > 0


# Broken


class FailingReads:
    """Reads of weights in memory that fail from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.failure = SourceReadError("scripted source", 0, 1, 0, "the test wants it so")
        self.fail = False
        original = MemoryPiece.read_into

        def read_into(piece: MemoryPiece, address: int, start: int, nbytes: int) -> None:
            if self.fail:
                raise self.failure
            original(piece, address, start, nbytes)

        patch.setattr(MemoryPiece, "read_into", read_into)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> FailingReads:
    return FailingReads(monkeypatch)


async def expect_broken(offload: Offload, subject: Subject, cause: BaseException) -> None:
    with pytest.raises(EngineBrokenError, match="close it and open a new one") as caught:
        await offload.run(subject.forward)
    assert caught.value.__cause__ is cause
    assert caught.value.cause is cause


async def test_a_source_that_fails_breaks_those_who_run_wait_and_come_later(reads: FailingReads) -> None:
    subject, device, in_block, queued = make_subject(NUM_BLOCKS), CpuDevice(), threading.Event(), threading.Event()

    def stay(index: int) -> None:
        if index == 0:
            in_block.set()
            wait_for(queued)
            reads.fail = True

    def call_directly() -> None:
        with pytest.raises(EngineBrokenError) as caught:
            subject.forward()
        assert caught.value.__cause__ is reads.failure

    async with streamflow.open_offload(subject.model, STAGED | ONE_AT_A_TIME, device=device) as offload:
        await subject.check_next(offload)
        subject.script.inside = stay
        subject.script.entered.clear()
        with offload.observe() as events:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(expect_broken, offload, subject, reads.failure)
                await until(in_block)
                check_says(offload, "ready", num_running=1, num_waiting=2)
                queued.set()
            told: list[ObservedEvent] = []
            while events.statistics().current_buffer_used:
                told.append(events.receive_nowait())
        assert [event.error for event in told if isinstance(event, EngineFailed)] == [reads.failure]
        check_says(offload, "broken")
        await expect_broken(offload, subject, reads.failure)
        await anyio.to_thread.run_sync(call_directly)
        assert subject.script.entered == [0]
    check_says(offload, "closed")
    await expect_broken(offload, subject, reads.failure)
    subject.check_restored(device)


async def test_an_offload_that_broke_in_one_opening_is_sound_in_the_next(reads: FailingReads) -> None:
    subject, device = make_subject(NUM_BLOCKS), CpuDevice()
    async with streamflow.open_offload(subject.model, STAGED, device=device) as offload:
        reads.fail = True
        await expect_broken(offload, subject, reads.failure)
    reads.fail = False
    async with streamflow.open_offload(subject.model, STAGED, device=device) as offload:
        await subject.check_next(offload)
    subject.check_restored(device)


def save_to(directory: Path, subject: Subject) -> Path:
    """The file that the model's checkpoint is."""
    save_checkpoint(subject.model, directory)
    (file,) = directory.iterdir()
    return file


def truncate(file: Path) -> None:
    """Leave an eighth of the file: less than its first block."""
    os.truncate(file, file.stat().st_size // 8)


@pytest.mark.parametrize("resident_blocks", [0, 1])
@with_each_transfer
async def test_a_file_that_is_truncated_breaks_the_offload(
    options: dict[str, Any], resident_blocks: int, tmp_path: Path
) -> None:
    subject = make_subject(NUM_BLOCKS)
    file, device, script = save_to(tmp_path, subject), CpuDevice(), Script()

    def build() -> nn.Module:
        return seeded(lambda: Scripted(NUM_BLOCKS, script))

    async with streamflow.open_streamed(
        build, tmp_path, {**options, "resident_blocks": resident_blocks}, device=device
    ) as (offload, model):
        streamed = Subject(model, script, subject.inputs, subject.expected, subject.before, subject.threads)
        await streamed.check_next(offload)
        truncate(file)
        for _ in range(2):
            with pytest.raises(EngineBrokenError) as caught:
                await offload.run(streamed.forward)
            assert isinstance(caught.value.__cause__, SourceReadError)
            assert str(file) in str(caught.value.__cause__)
            assert offload.state == offload.statistics().state == "broken"
    assert offload.state == "closed"
    assert streamflow_threads() == subject.threads
    assert device.memory().in_use == 0


@with_each_transfer
async def test_a_resident_block_that_cannot_be_read_fails_the_opening(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is of the kind that the source gives, and nothing stays open."""
    subject, device = make_subject(NUM_BLOCKS), CpuDevice()
    save_checkpoint(subject.model, tmp_path)
    original = FilePiece.read_into
    failure = SourceReadError("scripted source", 0, 1, 0, "the test wants it so")

    def read_into(piece: FilePiece, address: int, start: int, nbytes: int) -> None:
        if threading.current_thread().name.startswith(("streamflow copy", "streamflow packing")):
            raise failure
        original(piece, address, start, nbytes)

    monkeypatch.setattr(FilePiece, "read_into", read_into)
    with pytest.raises(SourceReadError) as caught:
        async with streamflow.open_streamed(
            lambda: seeded(lambda: Scripted(NUM_BLOCKS, Script())),
            tmp_path,
            {**options, "resident_blocks": 1},
            device=device,
        ):
            pytest.fail("it opened")
    assert caught.value is failure
    assert streamflow_threads() == subject.threads
    assert device.memory().in_use == 0
