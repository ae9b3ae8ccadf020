"""What others do with a model while it streams: real bytes, or a typed refusal that leaves it as it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import streamflow
from streamflow.errors import RefusedWhileAttachedError
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import (
    ModelState,
    compare,
    largest_block_bytes,
    resident_digests,
    run_calls,
    save_checkpoint,
    sha256_of,
)
from tests.streamflow.models import CALLS, CASES, Case, TwoStacks, block, mlp_stack, seeded

pytestmark = pytest.mark.anyio

NUM_BLOCKS = 4
RESIDENT_OR_NOT: list[dict[str, Any]] = [{"window_blocks": 1}, {"resident_blocks": 2}, {"resident_blocks": "all"}]


def digests(state: dict[str, Any]) -> dict[str, str]:
    return {name: sha256_of(tensor) for name, tensor in state.items()}


# Reading


@pytest.mark.parametrize("case", [case for case in CASES if case.streams], ids=str)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_state_dict_gives_the_real_bytes(case: Case) -> None:
    """Of blocks in the window, of blocks that are not, and of residents."""
    model = case.build()
    expected = digests(model.state_dict())
    options = {"plan": case.plan, "window_blocks": 1, "resident_blocks": 1}
    async with streamflow.open_offload(model, options) as offload:
        assert digests(model.state_dict()) == expected
        await offload.run(run_calls, model, case.calls[:1])
        assert digests(model.state_dict()) == expected
    assert digests(model.state_dict()) == expected


async def test_state_dict_gives_the_real_bytes_on_a_device_apart_and_of_any_part() -> None:
    model = seeded(TwoStacks)
    expected = digests(model.state_dict())
    part = {name: digest for name, digest in expected.items() if name.startswith("single_blocks.1.")}
    async with streamflow.open_offload(model, device=FarCpuDevice()) as offload:
        await offload.run(run_calls, model, CALLS[:1])
        assert digests(model.state_dict(prefix="x.")) == {f"x.{name}": digest for name, digest in expected.items()}
        assert digests(model.single_blocks[1].state_dict(prefix="single_blocks.1.")) == part  # type: ignore[index, union-attr]


async def test_state_dict_from_inside_a_request_gives_the_real_bytes() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = digests(model.state_dict())
    async with streamflow.open_offload(model) as offload:
        assert digests(await offload.run(model.state_dict)) == expected


async def test_state_dict_hooks_of_users_run_once_and_see_real_bytes() -> None:
    model, seen = mlp_stack(NUM_BLOCKS), []
    block(model, 1).register_state_dict_post_hook(
        lambda module, state, prefix, metadata: seen.append(sha256_of(state[f"{prefix}up.weight"]))
    )
    model.state_dict()
    async with streamflow.open_offload(model):
        model.state_dict()
    model.state_dict()
    assert len(seen) == 3
    assert len(set(seen)) == 1


async def test_a_state_dict_outlives_the_offload_and_its_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(mlp_stack(NUM_BLOCKS), tmp_path)
    expected = digests(mlp_stack(NUM_BLOCKS).state_dict())
    async with streamflow.open_streamed(lambda: mlp_stack(NUM_BLOCKS), tmp_path) as (_, model):
        state = model.state_dict()
    assert digests(state) == expected


async def test_a_model_saved_while_it_streams_loads_into_another(tmp_path: Path) -> None:
    model, other = mlp_stack(NUM_BLOCKS), seeded(lambda: mlp_stack(NUM_BLOCKS), seed=7)
    async with streamflow.open_offload(model):
        torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert resident_digests(other, CALLS) == resident_digests(model, CALLS)


# Everything else

REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "deepcopy of the model": copy.deepcopy,
    "deepcopy of a block": lambda model: copy.deepcopy(block(model, 1)),
    "deepcopy of a part of a block": lambda model: copy.deepcopy(block(model, 1).up),
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "pickle of a block": lambda model: pickle.dumps(block(model, 1)),
    "torch.save of the model": lambda model: torch.save(model, io.BytesIO()),
    "to another dtype": lambda model: model.to(torch.float16),
    "to another device": lambda model: model.to("meta"),
    "to another device and dtype": lambda model: model.to("cpu", torch.bfloat16),
    "to like a tensor": lambda model: model.to(torch.ones(1, dtype=torch.float64)),
    "block to another dtype": lambda model: block(model, 1).to(torch.float16),
    "half": lambda model: model.half(),
    "bfloat16 of a block": lambda model: block(model, 1).bfloat16(),
    "double of a part": lambda model: block(model, 1).up.double(),
    "float": lambda model: model.float(),
    "type": lambda model: model.type(torch.float16),
    "cuda": lambda model: model.cuda(),
    "cpu": lambda model: model.cpu(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "load_state_dict by assignment": lambda model: model.load_state_dict(model.state_dict(), assign=True),
    "load_state_dict of a block": lambda model: block(model, 1).load_state_dict(block(model, 1).state_dict()),
    "compile": lambda model: model.compile(),
    "compile of a block": lambda model: block(model, 1).compile(),
    "state_dict(keep_vars=True)": lambda model: model.state_dict(keep_vars=True),
}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_what_would_read_or_move_weights_is_refused_while_attached(
    operation: Callable[[nn.Module], object],
) -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    before = ModelState.of(model)
    async with streamflow.open_offload(model) as offload:
        attached = ModelState.of(model)
        with pytest.raises(RefusedWhileAttachedError, match=r"refused while it is streamed.*after closing") as caught:
            operation(model)
        assert caught.value.name.startswith("Stack")
        attached.assert_unchanged(model)
        await compare(offload, model, CALLS, expected)
    before.assert_unchanged(model)


@pytest.mark.parametrize("arguments", [("cpu",), (torch.device("cpu"),), (torch.ones(1),)], ids=str)
async def test_moving_the_model_to_where_it_is_changes_nothing(arguments: tuple[Any, ...]) -> None:
    """Pipelines do it before every call."""
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model) as offload:
        if isinstance(arguments[0], torch.Tensor):
            with pytest.raises(RefusedWhileAttachedError):  # names a dtype, too: blocks may hold several
                model.to(*arguments)
        else:
            assert model.to(*arguments) is model
            assert block(model, 1).to(*arguments) is block(model, 1)
        await compare(offload, model, CALLS, expected)


async def test_what_touches_no_weight_works_while_attached() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model) as offload:
        assert model.eval() is model
        assert model.train(False) is model
        assert model.requires_grad_(False) is model
        model.zero_grad()
        assert len(list(model.parameters())) == 4 + 6 * NUM_BLOCKS
        assert "Mlp" in repr(model)
        assert model.get_submodule("blocks.1.up") is block(model, 1).up
        await compare(offload, model, CALLS, expected)


async def test_all_of_it_works_again_after_closing() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model):
        pass
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert resident_digests(other, CALLS) == expected
    model.load_state_dict(model.state_dict())
    assert model.to("cpu").half().float() is model


# LoRA


def lora_model() -> Any:
    """The model of these tests with a real LoRA, which does something, in every block."""
    config = LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return get_peft_model(mlp_stack(NUM_BLOCKS), config).eval().requires_grad_(False)


class Lora:
    """That model, and what it gives with and without the LoRA."""

    def __init__(self) -> None:
        self.model = lora_model()
        self.with_lora = resident_digests(self.model, CALLS)
        self.without_lora = resident_digests(mlp_stack(NUM_BLOCKS), CALLS)
        assert self.with_lora != self.without_lora

    def block(self, index: int) -> Any:
        return self.model.base_model.model.blocks[index]


@pytest.fixture
def lora() -> Lora:
    return Lora()


@pytest.mark.parametrize("options", [*RESIDENT_OR_NOT, {"transfer": "staged"}], ids=str)
async def test_a_lora_loaded_before_opening_streams_with_its_blocks(lora: Lora, options: dict[str, Any]) -> None:
    before = ModelState.of(lora.model)
    async with streamflow.open_offload(lora.model, {"poison_freed_slots": True, **options}) as offload:
        await compare(offload, lora.model, CALLS, lora.with_lora)
        statistics = offload.statistics()
    before.assert_unchanged(lora.model)
    blocks = [lora.block(index) for index in range(NUM_BLOCKS)]
    assert any("lora_A" in name for name, _ in blocks[0].named_parameters())
    assert statistics.block_bytes == sum(largest_block_bytes([block]) for block in blocks)


async def test_a_lora_merged_before_opening_is_exact(lora: Lora) -> None:
    merged = lora.model.merge_and_unload()
    expected = resident_digests(merged, CALLS)
    assert expected != lora.without_lora
    async with streamflow.open_offload(merged) as offload:
        await compare(offload, merged, CALLS, expected)


MERGES: dict[str, Callable[[Lora], object]] = {
    "merge_and_unload": lambda lora: lora.model.merge_and_unload(),
    "merge_adapter": lambda lora: lora.model.merge_adapter(),
    "merge of a layer": lambda lora: lora.block(1).up.merge(),
    "safe merge of a layer": lambda lora: lora.block(1).up.merge(safe_merge=True),
}


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
async def test_merging_a_lora_into_placeholders_is_refused(lora: Lora, merge: Callable[[Lora], object]) -> None:
    before = ModelState.of(lora.model)
    async with streamflow.open_offload(lora.model) as offload:
        with pytest.raises(RefusedWhileAttachedError, match=r"merging an adapter of .*up is refused"):
            merge(lora)
        await compare(offload, lora.model, CALLS, lora.with_lora)
    before.assert_unchanged(lora.model)


async def test_unmerging_a_lora_from_placeholders_is_refused(lora: Lora) -> None:
    lora.model.merge_adapter()
    expected = resident_digests(lora.model, CALLS)
    async with streamflow.open_offload(lora.model) as offload:
        with pytest.raises(RefusedWhileAttachedError, match="unmerging"):
            lora.model.unmerge_adapter()
        with lora.model.disable_adapter(), pytest.raises(RefusedWhileAttachedError, match="unmerging"):
            await offload.run(run_calls, lora.model, CALLS)  # a layer that is merged unmerges itself in its forward
        await compare(offload, lora.model, CALLS, expected)
    lora.model.unmerge_adapter()
    torch.testing.assert_close(run_calls(lora.model, CALLS), run_calls(Lora().model, CALLS))


async def test_switching_a_lora_off_and_on_is_exact(lora: Lora) -> None:
    async with streamflow.open_offload(lora.model) as offload:
        with lora.model.disable_adapter():
            await compare(offload, lora.model, CALLS, lora.without_lora)
        await compare(offload, lora.model, CALLS, lora.with_lora)


async def test_a_lora_is_not_merged_into_files_that_others_map(tmp_path: Path) -> None:
    expected = Lora()
    save_checkpoint(expected.model, tmp_path)
    file = (tmp_path / "model.safetensors").read_bytes()
    async with streamflow.open_streamed(lora_model, tmp_path) as (offload, model):
        await compare(offload, model, CALLS, expected.with_lora)
        layer: Any = model.get_submodule("base_model.model.blocks.1.up")
        with pytest.raises(RefusedWhileAttachedError, match="merging an adapter"):
            layer.merge()
        await compare(offload, model, CALLS, expected.with_lora)
        assert offload.statistics().choice.source == "checkpoint"
    assert (tmp_path / "model.safetensors").read_bytes() == file
