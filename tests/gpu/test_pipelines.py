"""Whole pipelines on a real CUDA device: byte equality, flat memory, and what becomes of the allocator's cache."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import streamflow
from streamflow.stages.events import CacheDecided
from tests.streamflow.kit import sha256_of
from tests.streamflow.pipelines.families.all import FAMILIES
from tests.streamflow.pipelines.families.family import Family
from tests.streamflow.pipelines.families.flux import FLUX

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

DEVICE = torch.device("cuda", 0)


def resident_digest(family: Family) -> str:
    """What the whole pipeline gives on the device."""
    pipeline = family.build().to(DEVICE)
    return sha256_of(family.generate(pipeline).cpu())


async def requests(offload: streamflow.Offload, work: Callable[[], Any], number: int) -> list[bool]:
    """Run them, and say for each decision on the cache meanwhile whether it was given back."""
    releases: list[bool] = []
    with offload.observe() as events:
        for _ in range(number):
            await offload.run(work)
        for _ in range(events.statistics().current_buffer_used):
            event = events.receive_nowait()
            if isinstance(event, CacheDecided):
                releases.append(event.retention.releases)
    return releases


@pytest.mark.parametrize("options", [{}, {"transfer": "staged"}, {"resident_blocks": 1}], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
async def test_a_pipeline_gives_the_resident_pictures(
    family: Family, options: dict[str, Any], anyio_backend: str
) -> None:
    expected = resident_digest(family)
    pipeline = family.build()
    async with streamflow.open_offload(pipeline, {**options, "device": "cuda:0"}) as offload:
        assert pipeline.device == pipeline._execution_device == DEVICE
        for _ in range(2):
            assert sha256_of((await offload.run(family.generate, pipeline)).cpu()) == expected
        assert offload.statistics().engine.streamed_bytes > 0


async def test_requests_in_a_row_leave_device_memory_flat(anyio_backend: str) -> None:
    pipeline = FLUX.build()
    async with streamflow.open_offload(pipeline, {"device": "cuda:0"}) as offload:
        readings = []
        for number in range(50):
            await offload.run(FLUX.generate, pipeline)
            gc.collect()
            if number >= 5:
                readings.append((torch.cuda.memory_allocated(DEVICE), offload.statistics().engine.device_peak_bytes))
    assert len({peak for _, peak in readings}) == 1
    assert max(allocated for allocated, _ in readings) - min(allocated for allocated, _ in readings) < 1 << 20


async def test_a_steady_workload_never_flushes_and_a_growing_one_once_for_each_step(anyio_backend: str) -> None:
    """The reading of docs/pipelines.md: activations that the allocator keeps, of sizes that the test decides."""
    pipeline = FLUX.build()

    def request(megabytes: int) -> None:
        torch.empty(megabytes << 20, dtype=torch.uint8, device=DEVICE)  # what activations leave in the cache
        FLUX.generate(pipeline)

    torch.cuda.empty_cache()
    async with streamflow.open_offload(pipeline, {"device": "cuda:0"}) as offload:
        await requests(offload, partial(request, 64), 3)
        assert not any(await requests(offload, partial(request, 64), 10))
        for megabytes in (256, 1024):
            work = partial(request, megabytes)
            grown = await requests(offload, work, 3)
            assert 1 <= sum(grown) <= 2, grown  # one for the step; a boundary may see it in two parts
            assert not any(await requests(offload, work, 5))


async def test_no_stream_but_the_requests_own_is_needed_for_a_staged_component(anyio_backend: str) -> None:
    """What the caller had queued comes first, and the result is ready on the caller's stream."""
    pipeline = FLUX.build()
    resident = FLUX.build().to(DEVICE)
    latents = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        expected = sha256_of(resident.vae.decode(latents).sample.cpu())
        async with streamflow.open_offload(pipeline, {"device": "cuda:0"}) as offload:
            for _ in range(20):
                busy = torch.randn(2048, 2048, device=DEVICE)
                for _ in range(8):
                    busy = busy @ busy
                moved = latents.clone()
                result = await offload.run(lambda z=moved: pipeline.vae.decode(z).sample)
                assert sha256_of(result.cpu()) == expected
