"""Where pipelines keep their weights on the host: exactly once, exactly as large, and flat over requests."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import streamflow
from streamflow.errors import HostMemoryError
from streamflow.runtime.inputs import on_device
from streamflow.weights import module_source
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import ModelState, aligned, sha256_of
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.families.wan import WAN
from tests.streamflow.pipelines.kit import ready, resident_set_bytes
from tests.streamflow.pipelines.test_staged import TOKENS, expected
from tests.streamflow.pipelines.toys import toy_pipeline

pytestmark = pytest.mark.anyio

TRANSFERS: list[dict[str, Any]] = [
    {"transfer": "direct"},
    {"transfer": "staged", "packing_threads": 2, "staging_chunk_bytes": 4096},
    {"pin_host_memory": False, "packing_threads": 1},
]


@pytest.mark.parametrize("options", TRANSFERS, ids=str)
async def test_an_accelerator_is_given_every_component_by_every_transfer(options: dict[str, Any]) -> None:
    pipeline, device = toy_pipeline(experts=2), FarCpuDevice()
    resident = expected(pipeline)
    before = {name: ModelState.of(module) for name, module in pipeline.components.items()}
    async with streamflow.open_offload(pipeline, {"resident_blocks": 1, **options}, device=device) as offload:
        for _ in range(3):
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
        assert offload.statistics().engine.streamed_bytes > 0
    assert device.memory().in_use == 0
    for name, module in pipeline.components.items():
        before[name].assert_unchanged(module, in_place=options.get("transfer") != "direct")


@pytest.mark.parametrize("family", [FLUX, WAN], ids=str)
async def test_real_pipelines_run_on_an_accelerator(family: Any) -> None:
    given = ready(family)
    async with streamflow.open_offload(given.pipeline, {"poison_freed_slots": True}, device=FarCpuDevice()) as offload:
        await given.check(offload)
        assert offload.statistics().engine.streamed_bytes > 0


async def test_page_locked_masters_are_exactly_as_large_as_the_weights() -> None:
    """Not rounded up to powers of two, tied weights once."""
    pipeline = toy_pipeline()
    async with streamflow.open_offload(pipeline, {"transfer": "direct"}, device=FarCpuDevice()) as offload:
        statistics = offload.statistics()
    for sizes in statistics.components:
        tensors = {id(t): t for t in pipeline.components[sizes.name].state_dict(keep_vars=True).values()}
        exact = sum(aligned(tensor.nbytes) for tensor in tensors.values())
        if sizes.name == "transformer":  # what is outside the blocks has no image
            exact -= sum(aligned(tensor.nbytes) for tensor in pipeline.transformer.project.parameters())
        assert sizes.host_image_bytes == exact


async def test_masters_that_do_not_fit_under_the_limit_are_refused_and_the_pipeline_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    before = ModelState.of(pipeline.vae)
    monkeypatch.setattr(module_source, "available_host_bytes", lambda: 2000)
    with pytest.raises(HostMemoryError, match="pin_host_memory=False"):
        async with streamflow.open_offload(pipeline, {"transfer": "direct"}, device=FarCpuDevice()):
            pytest.fail("it opened")
    before.assert_unchanged(pipeline.vae)
    assert expected(pipeline) == resident


def test_inputs_that_a_pipeline_leaves_on_the_host_are_taken_along() -> None:
    """Some pipelines put tensors where a component says that it is, which is the host while it is absent."""
    inputs = ((torch.ones(2), {"mask": torch.ones(1, device="meta")}), {"text": ["a", torch.ones(3)], "scale": 2.0})
    moved = on_device(inputs, torch.device("meta"))
    assert [leaf.device.type for leaf in tree_leaves(moved) if isinstance(leaf, torch.Tensor)] == ["meta"] * 3
    assert moved[1]["text"][0] == "a"
    assert on_device(moved, torch.device("meta")) is moved


async def test_requests_in_a_row_leave_host_memory_flat() -> None:
    pipeline = toy_pipeline(more={"text_encoder_2": torch.nn.Linear(1024, 1024).requires_grad_(False)})

    def request() -> None:
        pipeline(TOKENS)
        with torch.no_grad():
            pipeline.text_encoder_2(torch.ones(1, 1024))

    async with streamflow.open_offload(pipeline, device=FarCpuDevice()) as offload:
        for _ in range(10):
            await offload.run(request)
        gc.collect()
        before = resident_set_bytes()
        for _ in range(50):
            await offload.run(request)
        gc.collect()
        grown = resident_set_bytes() - before
    assert grown < 4 * 1024 * 1024  # one copy of the second encoder: fifty would be two hundred megabytes
