"""Known faults of sizes and selection: the wrong part of a model is streamed, too much of it moves, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import streamflow
from streamflow import OffloadPlan
from streamflow.errors import BlocksBypassedError, PlanError, UnsupportedModelError
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import ModelState, compare, largest_block_bytes, resident_digests, stream_and_compare
from tests.streamflow.models import (
    CALLS,
    WIDTH,
    BehindProperty,
    Case,
    Mlp,
    Scheduled,
    Stack,
    block,
    blocks_of,
    mlp_stack,
    seeded,
)

pytestmark = pytest.mark.anyio


async def refused(model: Any, plan: OffloadPlan | None = None, **options: Any) -> Exception:
    """The error that opening raises; a module is left as it was."""
    before = ModelState.of(model) if isinstance(model, nn.Module) else None
    with pytest.raises(streamflow.StreamflowError) as caught:
        async with streamflow.open_offload(model, {"plan": plan, **options}):
            raise AssertionError("it was opened")
    if before is not None:
        before.assert_unchanged(model)
    return caught.value


async def test_blocks_of_very_unequal_size_share_one_window() -> None:
    sizes = (1, 40, 1, 1, 60, 2)
    case = Case("unequal", lambda: seeded(lambda: Stack(Mlp(size * WIDTH) for size in sizes)), CALLS)
    for window in (1, 2, 4):
        statistics = await stream_and_compare(case, {"window_blocks": window})
        blocks = blocks_of(case.build())
        assert statistics.engine.window_bytes == window * largest_block_bytes(blocks)


async def test_a_block_list_behind_a_property_does_not_move_the_whole_model_to_the_device() -> None:
    case = Case("property", lambda: seeded(BehindProperty), CALLS)
    statistics = await stream_and_compare(case, {"window_blocks": 1}, device=FarCpuDevice(), in_place=False)
    blocks = [module for module in case.build().modules() if isinstance(module, Mlp)]
    assert statistics.num_blocks == len(blocks) == 4
    assert statistics.fixed_bytes == 0
    assert statistics.engine.device_peak_bytes == largest_block_bytes(blocks)


@pytest.mark.parametrize("path", ["layers", "blocks.x", "blocks.9", "enter.blocks", "exit.weight.0"])
async def test_an_attribute_that_matches_nothing_lists_what_could_have_matched(path: str) -> None:
    model = mlp_stack(2)
    model.more = nn.ModuleList([Mlp()])
    error = await refused(model, OffloadPlan(stacks=path))
    assert isinstance(error, PlanError)
    assert error.candidates == ("blocks", "more")
    assert path in str(error)
    assert "block lists in this model: blocks, more" in str(error)


@pytest.mark.parametrize("path", ["enter", "exit.weight", "blocks.0"])
async def test_an_attribute_that_is_no_list_of_modules_lists_what_could_have_been_meant(path: str) -> None:
    error = await refused(mlp_stack(2), OffloadPlan(stacks=path))
    assert isinstance(error, PlanError)
    assert error.candidates == ("blocks",)


async def test_a_model_without_a_block_list_says_how_to_declare_one() -> None:
    error = await refused(nn.Sequential(Mlp(), Mlp()))
    assert isinstance(error, PlanError)
    assert "OffloadPlan(stacks=" in str(error)


async def test_lists_that_only_hold_lists_are_no_blocks() -> None:
    """Nobody calls a list: its 'blocks' would be poison whenever their members are called."""
    for plan in (None, OffloadPlan(stacks="levels")):
        error = await refused(seeded(Levels), plan)
        assert isinstance(error, PlanError)
        assert error.candidates == ("levels",)
    case = Case("levels", lambda: seeded(Levels), CALLS, OffloadPlan(stacks=("levels.0", "levels.1")))
    assert (await stream_and_compare(case)).num_blocks == 4


class Levels(nn.Module):
    """Lists of blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleList(Mlp() for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for level in self.levels:
            assert isinstance(level, nn.ModuleList)
            for inner in level:
                x = inner(x)
        return x


class CallsParts(nn.Module):
    """Calls the parts of its blocks, never a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.whole = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.blocks:
            assert isinstance(inner, Mlp)
            x = inner(x) if self.whole else x + inner.down(inner.up(x))
        return x


async def test_a_model_that_calls_parts_of_its_blocks_is_told_instead_of_computing_with_placeholders() -> None:
    """The plan was accepted, and nothing would be streamed for a call that goes past the blocks."""
    model = seeded(CallsParts)
    async with streamflow.open_offload(model) as offload:
        with torch.no_grad(), pytest.raises(BlocksBypassedError, match="none of its 4 streamed blocks") as caught:
            await offload.run(model, *CALLS[0])
        assert caught.value.component == "CallsParts"
    model.whole = True  # type: ignore[assignment]
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model) as offload:
        await compare(offload, model, CALLS, expected)


async def test_a_forward_that_calls_no_block_and_needs_none_is_no_fault() -> None:
    case = Case("skips all", lambda: seeded(Scheduled), tuple((*call, ()) for call in CALLS))
    await stream_and_compare(case)


async def test_blocks_inside_blocks_are_refused() -> None:
    model = mlp_stack(2)
    block(model, 1).parts = nn.ModuleList([Mlp()])
    error = await refused(model, OffloadPlan(stacks=("blocks", "blocks.1.parts")))
    assert isinstance(error, PlanError)
    assert "blocks.1.parts.0 lies inside the block blocks.1" in str(error)


async def test_a_block_that_is_no_part_of_the_model_is_refused() -> None:
    model: Any = mlp_stack(2)
    model.loose = [Mlp(), Mlp()]
    error = await refused(model, OffloadPlan(stacks="loose"))
    assert isinstance(error, PlanError)
    assert "loose[0] is not a part of the model" in str(error)


async def test_a_plan_without_stacks_is_refused_for_nothing_would_stream() -> None:
    with pytest.raises(PlanError, match="at least one stack"):
        OffloadPlan(stacks=())


@pytest.mark.parametrize("stacks", ["", ("blocks", ""), 3, None, ("blocks", 3)])
async def test_a_plan_of_anything_but_paths_is_refused(stacks: Any) -> None:
    with pytest.raises(TypeError, match="attribute paths"):
        OffloadPlan(stacks=stacks)


async def test_residents_of_a_stack_that_is_not_streamed_are_refused() -> None:
    error = await refused(mlp_stack(2), OffloadPlan(stacks="blocks", resident_eligible="layers"))
    assert isinstance(error, PlanError)
    assert "resident_eligible names ['layers']" in str(error)


async def test_a_plan_that_a_class_declares_is_used_and_a_wrong_one_is_refused() -> None:
    class Declared(Scheduled):
        streamflow_plan: Any = OffloadPlan(stacks="blocks", resident_eligible=())

    case = Case("declared", lambda: seeded(Declared), tuple((*call, range(6)) for call in CALLS))
    assert (await stream_and_compare(case, {"resident_bytes": 1 << 30})).num_resident_blocks == 0
    Declared.streamflow_plan = "blocks"
    assert isinstance(await refused(case.build()), PlanError)


@pytest.mark.parametrize("model", [None, {}, "model", nn.Linear, SimpleNamespace(components={})], ids=str)
async def test_what_is_no_module_is_refused_by_its_type(model: Any) -> None:
    error = await refused(model)
    assert isinstance(error, UnsupportedModelError)
    assert error.name == type(model).__name__
