"""The stacks of real models are found without being declared, and in the order in which they run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streamflow
from streamflow.discovery import block_list_paths, find_blocks
from streamflow.errors import PlanError
from tests.streamflow.kit import run_calls, stream_and_compare
from tests.streamflow.models import CALLS, Case, Mlp, Stack, seeded
from tests.streamflow.real_models.models import FLUX_MODEL, MODELS, DiffusersModel


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_stacks_are_found_in_execution_order(model: DiffusersModel) -> None:
    module = model.build()
    blocks = find_blocks(module)
    assert [block.path for block in blocks] == model.block_paths
    assert list(dict.fromkeys(block.stack for block in blocks)) == list(model.stacks)
    ran: list[str] = []
    for block in blocks:
        block.module.register_forward_pre_hook(lambda module, args, path=block.path: ran.append(path))
    run_calls(module, model.calls(torch.float32)[:1])
    assert ran == model.block_paths


@pytest.mark.anyio
@pytest.mark.parametrize("model", MODELS, ids=str)
async def test_the_first_walk_already_follows_the_order(model: DiffusersModel) -> None:
    """No block comes out of turn, so each walk fetches each block once, and the start of the next walk is at hand."""
    module, calls = model.build(), model.calls(torch.float32)
    async with streamflow.open_offload(module, {"window_blocks": 2}) as offload:
        await offload.run(run_calls, module, calls)
        engine = offload.statistics().engine
    assert engine.num_on_demand_fetches == 0
    assert engine.num_walks == engine.num_passes == len(calls)
    assert engine.num_fetches <= len(calls) * len(model.block_paths) + 2


def test_flux_has_two_stacks_of_unlike_blocks() -> None:
    kinds = [type(block.module).__name__ for block in find_blocks(FLUX_MODEL.build())]
    assert kinds == ["FluxTransformerBlock"] * 3 + ["FluxSingleTransformerBlock"] * 5


class PartlyNamed(Stack):
    """As UNets have it: of the lists that hold its bytes, its class names the blocks of one."""

    _no_split_modules = ("Mlp",)

    def __init__(self, num_named: int, num_others: int) -> None:
        super().__init__([Mlp() for _ in range(num_named)])
        self.others = nn.ModuleList(nn.Sequential(Mlp()) for _ in range(num_others))
        self.tiny = nn.ModuleList([nn.LayerNorm(1)])


@pytest.mark.parametrize(
    ("num_named", "num_others", "stacks"),
    [(1, 4, {"blocks", "others"}), (3, 1, {"blocks", "others"}), (9, 1, {"blocks"}), (30, 1, {"blocks"})],
)
def test_where_a_class_names_few_of_its_blocks_the_other_large_lists_stream_too(
    num_named: int, num_others: int, stacks: set[str]
) -> None:
    assert {block.stack for block in find_blocks(PartlyNamed(num_named, num_others))} == stacks


class WithGap(Stack):
    """As decoders have it that leave a block out: a list with None where the block would be."""

    def __init__(self) -> None:
        super().__init__([Mlp() for _ in range(3)])
        self.skips = nn.ModuleList([None, Mlp()])  # type: ignore[list-item]


def test_a_list_with_a_gap_is_no_stack_and_hinders_none() -> None:
    model = WithGap()
    assert [block.path for block in find_blocks(model)] == ["blocks.0", "blocks.1", "blocks.2"]
    assert block_list_paths(model) == ["blocks", "skips"]
    with pytest.raises(PlanError, match="'skips' is no list of modules") as caught:
        find_blocks(model, streamflow.OffloadPlan(stacks="skips"))
    assert caught.value.candidates == ("blocks", "skips")


@pytest.mark.anyio
async def test_a_model_with_such_a_list_streams() -> None:
    await stream_and_compare(Case("gap", lambda: seeded(WithGap), CALLS))
