"""Devices smaller than the model, with one compute unit, with a slow link: exact, and within their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceMemoryError
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import (
    compare,
    largest_block_bytes,
    resident_digests,
    save_checkpoint,
    stream_and_compare,
    stream_files_and_compare,
)
from tests.streamflow.models import CALLS, CASES, WIDTH, Case, block, blocks_of, mlp_stack

pytestmark = pytest.mark.anyio

CASE = Case("mlp", lambda: mlp_stack(8), CALLS)
#: A matrix, and three vectors that take a whole aligned place each.
OUTSIDE_BYTES = 4 * WIDTH * WIDTH + 3 * 256


def slot_bytes() -> int:
    blocks = blocks_of(CASE.build())
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
    device = CpuDevice(memory_limit_bytes=2 * slot_bytes() + OUTSIDE_BYTES)
    statistics = await stream_files_and_compare(CASE, tmp_path, {"window_blocks": 2}, device=device)
    assert statistics.choice.source == "checkpoint"
    assert statistics.fixed_bytes == OUTSIDE_BYTES
    assert statistics.engine.device_peak_bytes == 2 * slot_bytes() + OUTSIDE_BYTES < statistics.model_bytes / 2


@pytest.mark.parametrize("transfer", ["auto", "staged"])
async def test_one_compute_unit_is_exact(transfer: str) -> None:
    device = CpuDevice(compute_units=1)
    await stream_and_compare(CASE, {"transfer": transfer, "staging_chunk_bytes": 4096}, device=device)


async def test_a_compute_unit_comes_back_when_a_block_fails() -> None:
    model = CASE.build()
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model, {"window_blocks": 1}, device=CpuDevice(compute_units=1)) as offload:
        for _ in range(3):
            with torch.no_grad(), pytest.raises(RuntimeError, match="normalized_shape"):
                await offload.run(block(model, 1), torch.zeros(2, 3))  # its norm refuses three features
        await compare(offload, model, CALLS, expected)


async def test_a_link_slower_than_the_compute_is_exact() -> None:
    """The thread waits for every copy: 16 KiB at 16 MiB/s take a millisecond."""
    device = CpuDevice(link_bytes_per_s=16 << 20)
    statistics = await stream_and_compare(CASE, {"window_blocks": 1}, device=device)
    assert statistics.engine.event_wait_s + statistics.engine.mailbox_wait_s > 0


@pytest.mark.parametrize("run_ahead", [1, 2, 100])
async def test_any_distance_of_running_ahead_is_exact(run_ahead: int) -> None:
    await stream_and_compare(CASE, {"run_ahead_blocks": run_ahead})


each_streaming_case = pytest.mark.parametrize("case", [case for case in CASES if case.streams], ids=str)


@each_streaming_case
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_every_model_is_exact_on_a_device_apart_from_page_locked_images(case: Case) -> None:
    statistics = await stream_and_compare(case, {"packing_threads": 2}, device=FarCpuDevice(), in_place=False)
    assert (statistics.choice.source, statistics.choice.transfer) == ("module", "direct")
    assert statistics.host_image_bytes == statistics.block_bytes > 0


@each_streaming_case
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_model_is_exact_on_a_device_apart_from_pageable_memory(case: Case) -> None:
    options = {"pin_host_memory": False, "packing_threads": 2, "staging_chunk_bytes": 1024, "resident_blocks": 1}
    statistics = await stream_and_compare(case, options, device=FarCpuDevice())
    assert (statistics.choice.source, statistics.choice.transfer) == ("module", "staged")
    assert statistics.host_image_bytes == 0


async def test_what_is_outside_the_blocks_goes_to_the_device_once() -> None:
    statistics = await stream_and_compare(CASE, device=FarCpuDevice(), in_place=False)
    assert statistics.fixed_bytes == OUTSIDE_BYTES
    assert statistics.engine.device_peak_bytes == 2 * slot_bytes() + OUTSIDE_BYTES


async def test_page_locked_images_are_exactly_as_large_as_the_blocks() -> None:
    """Not rounded up to powers of two."""
    statistics = await stream_and_compare(CASE, device=FarCpuDevice(), in_place=False)
    blocks = blocks_of(CASE.build())
    assert statistics.host_image_bytes == sum(largest_block_bytes([block]) for block in blocks)
