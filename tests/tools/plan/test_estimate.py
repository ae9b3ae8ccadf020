"""A plan's numbers are those that opening gives."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamflow import OffloadConfig, OffloadStatistics, open_offload, open_streamed
from streamflow.errors import ConfigurationError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.testing.registrar import ScriptedRegistrar
from streamflow.tools.plan.estimate import plan_component
from streamflow.tools.plan.model_dir import Component, read_model_dir
from streamflow.tools.plan.values import ComponentPlan, SourcePlan

SaveModel = Callable[..., Path]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_blocks": 1},
    {"window_blocks": 3, "resident_blocks": 3},
    {"window_blocks": 3, "resident_blocks": 3, "resident_placement": "leading"},
    {"resident_bytes": 30_000},
    {"resident_bytes": 30_000, "resident_placement": "leading", "resident_blocks": 2},
    {"resident_blocks": 7, "window_blocks": 4},
    {"resident_blocks": "all"},
    {"transfer": "staged", "packing_threads": 2, "staging_chunk_bytes": 1 << 20},
    {"transfer": "staged", "packing_threads": 3, "staging_chunk_bytes": 4096},
    {"window_blocks": 100},
]


class Accelerator(CpuDevice):
    """Host memory that behaves as if it were a device's own: nothing reads the source itself."""

    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self.registrar = ScriptedRegistrar()


@pytest.fixture(params=["single", "sharded"])
def saved(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_model: nn.Module,
    save_single: SaveModel,
    save_sharded: SaveModel,
) -> Path:
    return {"single": save_single, "sharded": save_sharded}[request.param](tiny_model, tmp_path / "saved")


def component_at(path: Path) -> Component:
    (component,) = read_model_dir(path).components
    return component


def source_of(plan: ComponentPlan, name: str) -> SourcePlan:
    (source,) = [source for source in plan.sources if source.name == name]
    return source


def check(plan: ComponentPlan, source: SourcePlan, statistics: OffloadStatistics) -> None:
    engine = statistics.engine
    assert plan.window_bytes == engine.window_bytes
    assert plan.resident_bytes == engine.resident_bytes
    assert len(plan.resident_blocks) == statistics.num_resident_blocks
    assert plan.num_blocks == statistics.num_blocks
    assert plan.block_bytes == statistics.block_bytes
    assert plan.weight_bytes == statistics.model_bytes
    assert source.page_locked_bytes == statistics.host_image_bytes
    assert source.staging_bytes == engine.staging_bytes
    assert (source.transfer, source.transfer_reason) == (statistics.choice.transfer, statistics.choice.transfer_reason)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_a_checkpoint_streams_as_planned(saved: Path, build: Callable[[], nn.Module], options: Any) -> None:
    config = OffloadConfig(device="cpu", **options)
    plan = plan_component(component_at(saved), config, device_is_host=True)
    async with open_streamed(build, saved, config) as (offload, model):
        with torch.no_grad():
            await offload.run(model, torch.randn(2, 5))
        statistics = offload.statistics()
    source = source_of(plan, "checkpoint")
    assert plan.source == statistics.choice.source == source.name
    check(plan, source, statistics)
    assert source.fixed_bytes == statistics.fixed_bytes > 0
    assert plan.device_bytes == statistics.engine.device_peak_bytes
    assert plan.streamed_bytes <= statistics.engine.streamed_bytes <= plan.streamed_bytes + plan.window_bytes


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_a_loaded_module_streams_as_planned(saved: Path, tiny_model: nn.Module, options: Any) -> None:
    config = OffloadConfig(device="cpu", **options)
    plan = plan_component(component_at(saved), config, device_is_host=True)
    async with open_offload(tiny_model, config) as offload:
        statistics = offload.statistics()
    source = source_of(plan, "module")
    check(plan, source, statistics)
    assert source.fixed_bytes == statistics.fixed_bytes == 0
    assert source.weight_host_bytes == statistics.model_bytes
    assert plan.window_bytes + plan.resident_bytes == statistics.engine.device_peak_bytes


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pin_host_memory": False, "packing_threads": 2},
        {"transfer": "staged"},
        {"host_registration_limit_bytes": 0},
    ],
    ids=str,
)
async def test_on_an_accelerator_both_stream_as_planned(
    saved: Path, build: Callable[[], nn.Module], tiny_model: nn.Module, options: Any
) -> None:
    config = OffloadConfig(device="cpu", **options)
    plan = plan_component(component_at(saved), config, device_is_host=False)
    async with open_streamed(build, saved, config, device=Accelerator()) as (offload, _):
        statistics = offload.statistics()
    checkpoint = source_of(plan, "checkpoint")
    check(plan, checkpoint, statistics)
    assert checkpoint.transfer == ("direct" if options == {} else "staged")
    assert 0 <= statistics.registration.registered_bytes - checkpoint.registered_bytes < 4 * mmap.PAGESIZE
    module = source_of(plan, "module")
    async with open_offload(tiny_model, config, device=Accelerator()) as offload:
        check(plan, module, offload.statistics())
    is_pinned = options.get("transfer") != "staged" and options.get("pin_host_memory", True)
    assert module.transfer == ("direct" if is_pinned else "staged")
    fixed = sum(tensor.nbytes for name, tensor in tiny_model.state_dict().items() if not name.startswith("blocks."))
    assert module.weight_host_bytes == (fixed + plan.block_bytes if is_pinned else plan.weight_bytes)


@pytest.mark.anyio
async def test_more_than_may_be_registered_is_staged_as_planned(saved: Path, build: Callable[[], nn.Module]) -> None:
    config = OffloadConfig(device="cpu", host_registration_limit_bytes=1000)
    plan = source_of(plan_component(component_at(saved), config, device_is_host=False), "checkpoint")
    async with open_streamed(build, saved, config, device=Accelerator()) as (offload, _):
        choice = offload.statistics().choice
    assert (plan.transfer, plan.registered_bytes) == (choice.transfer, 0) == ("staged", 0)
    for reason in (plan.transfer_reason, choice.transfer_reason):
        assert "bytes are over host_registration_limit_bytes=1,000" in reason


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"topology": {"tensor_parallel_size": 2}}, "unsupported_tp"),
        ({"topology": {"hsdp": True}}, "unsupported_hsdp"),
        ({"topology": {"online_quantization": "fp8"}}, "unsupported_online_quantization"),
    ],
)
async def test_a_checkpoint_that_cannot_stream_is_planned_from_the_module(
    saved: Path, build: Callable[[], nn.Module], tiny_model: nn.Module, options: Any, code: str
) -> None:
    config = OffloadConfig(device="cpu", **options)
    plan = plan_component(component_at(saved), config, device_is_host=True)
    async with open_streamed(build, saved, config, load=lambda _: tiny_model) as (offload, _):
        choice = offload.statistics().choice
    assert plan.source == choice.source == "module"
    assert code in plan.source_reason
    assert plan.source_reason == f"no checkpoint: {choice.source_reason}"
    assert source_of(plan, "checkpoint").problem == choice.source_reason


def test_direct_from_pageable_memory_is_not_possible(saved: Path) -> None:
    config = OffloadConfig(device="cpu", transfer="direct", host_registration_limit_bytes=0)
    plan = plan_component(component_at(saved), config, device_is_host=False)
    assert plan.source == "module"
    assert "transfer='direct' is not possible: the checkpoint source is pageable memory" in plan.source_reason
    unpinned = OffloadConfig(device="cpu", transfer="direct", pin_host_memory=False)
    plan = plan_component(component_at(saved), unpinned, device_is_host=False)
    assert (plan.source, plan.chosen) == (None, None)
    assert plan.source_reason.count("transfer='direct' is not possible") == 2
    assert plan.device_bytes == plan.window_bytes


def test_more_residents_than_blocks_are_refused(saved: Path) -> None:
    with pytest.raises(ConfigurationError, match="resident_blocks is 9 but saved has 8 blocks; use 'all'"):
        plan_component(component_at(saved), OffloadConfig(device="cpu", resident_blocks=9), device_is_host=True)


def test_a_component_without_blocks_has_an_empty_plan(component: Callable[..., Component]) -> None:
    config = OffloadConfig(device="cpu", resident_blocks=3)
    plan = plan_component(component({"head": 7}), config, device_is_host=True)
    assert (plan.stacks, plan.sources, plan.source, plan.num_blocks, plan.device_bytes) == ((), (), None, 0, 0)


def test_residents_are_counted_by_stack(component: Callable[..., Component]) -> None:
    sizes = {f"a.{i}.w": 300 for i in range(2)} | {f"b.{i}.w": 100 * (i + 1) for i in range(4)}
    config = OffloadConfig(device="cpu", resident_blocks=3)
    plan = plan_component(component(sizes), config, device_is_host=True, stacks=("b", "a"))
    assert plan.resident_blocks == (1, 3, 5)
    assert [(stack.path, stack.num_blocks, stack.num_resident_blocks) for stack in plan.stacks] == [
        ("b", 4, 2),
        ("a", 2, 1),
    ]
    assert [(stack.min_block_bytes, stack.max_block_bytes, stack.total_bytes) for stack in plan.stacks] == [
        (256, 512, 1536),
        (512, 512, 1024),
    ]
    assert plan.dtype_bytes == {"uint8": 1600}
