"""Devices smaller than the model, with one compute unit, with a slow link: exact, and within their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceMemoryError
from tests.streamflow.kit import (
    compare,
    largest_block_bytes,
    resident_digests,
    run_calls,
    save_checkpoint,
    stream_and_compare,
    stream_files_and_compare,
)
from tests.streamflow.models import CALLS, Case, mlp_stack

pytestmark = pytest.mark.anyio

CASE = Case("mlp", lambda: mlp_stack(8), CALLS)


def slot_bytes() -> int:
    blocks = CASE.build().blocks
    assert isinstance(blocks, nn.ModuleList)
    return largest_block_bytes(blocks)


async def test_a_device_with_room_for_the_window_alone_is_enough() -> None:
    device = CpuDevice(memory_limit_bytes=2 * slot_bytes())
    statistics = await stream_and_compare(CASE, {"window_blocks": 2}, device=device)
    assert statistics.engine.device_peak_bytes == 2 * slot_bytes() < statistics.model_bytes / 2


async def test_a_device_with_one_byte_less_is_refused_with_the_numbers() -> None:
    device = CpuDevice(memory_limit_bytes=2 * slot_bytes() - 1)
    with pytest.raises(DeviceMemoryError, match="use fewer window_blocks") as caught:
        await stream_and_compare(CASE, {"window_blocks": 2}, device=device)
    assert (caught.value.wanted, caught.value.in_use) == (slot_bytes(), slot_bytes())
    assert device.memory().in_use == 0


async def test_a_device_smaller_than_the_model_is_enough_from_construction_on(tmp_path: Path) -> None:
    """Neither building nor opening brings more there than the window and what is outside the blocks."""
    save_checkpoint(CASE.build(), tmp_path)
    outside = 4 * 256 + 4 * 16 * 16 - 256  # two weights, their biases: enter (1024 + 64 bytes) and exit (64 + 64)
    device = CpuDevice(memory_limit_bytes=2 * slot_bytes() + outside)
    statistics = await stream_files_and_compare(CASE, tmp_path, {"window_blocks": 2}, device=device)
    assert statistics.choice.source == "checkpoint"
    assert statistics.fixed_bytes == outside
    assert statistics.engine.device_peak_bytes == 2 * slot_bytes() + outside < statistics.model_bytes / 2


@pytest.mark.parametrize("transfer", ["auto", "staged"])
async def test_one_compute_unit_is_exact(transfer: str) -> None:
    device = CpuDevice(compute_units=1)
    await stream_and_compare(CASE, {"transfer": transfer, "staging_chunk_bytes": 4096}, device=device)


async def test_a_compute_unit_comes_back_when_a_block_fails() -> None:
    model = CASE.build()
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model, {"window_blocks": 1}, device=CpuDevice(compute_units=1)) as offload:
        for _ in range(3):
            with torch.no_grad(), pytest.raises(RuntimeError, match="shape"):
                await offload.run(model, torch.zeros(2, 3))
            with pytest.raises(AttributeError):
                await offload.run(run_calls, model.blocks, [(0,)])
        await compare(offload, model, CALLS, expected)


async def test_a_link_slower_than_the_compute_is_exact() -> None:
    """The thread waits for every copy: 16 KiB at 16 MiB/s take a millisecond."""
    device = CpuDevice(link_bytes_per_s=16 << 20)
    statistics = await stream_and_compare(CASE, {"window_blocks": 1}, device=device)
    assert statistics.engine.event_wait_s + statistics.engine.mailbox_wait_s > 0


@pytest.mark.parametrize("run_ahead", [1, 2, 100])
async def test_any_distance_of_running_ahead_is_exact(run_ahead: int) -> None:
    await stream_and_compare(CASE, {"run_ahead_blocks": run_ahead})
