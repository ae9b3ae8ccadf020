"""Known faults of buffers and layout, and of tied weights: what is forgotten, moved, converted or separated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

import streamflow
from streamflow.errors import CheckpointUnusableError, UnsupportedModelError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.weights.checkpoint_plan import FallbackCode
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import (
    ModelState,
    compare,
    resident_digests,
    save_checkpoint,
    sha256_of,
    stream_and_compare,
    stream_files_and_compare,
    tensors_of,
)
from tests.streamflow.models import (
    CALLS,
    CASES,
    WIDTH,
    Bare,
    Buffers,
    Case,
    Mlp,
    Stack,
    TiedInside,
    TwoStacks,
    block,
    mlp_stack,
    seeded,
    tied_across_blocks,
)

pytestmark = pytest.mark.anyio

TIED = Case("tied", lambda: seeded(tied_across_blocks), CALLS)


class Wrapped(torch.Tensor):
    """A tensor subclass whose values are in an inner tensor, as quantized weights have them."""

    values_inside: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        wrapped: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.values_inside = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(Wrapped, lambda tensor: tensor.values_inside, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return cls(result) if func is torch.ops.aten.detach.default else result


class Plain(torch.Tensor):
    """A tensor subclass without values of its own."""


# Buffers and layout


async def test_buffers_are_not_forgotten_when_parameters_are_restored() -> None:
    """Poison in a buffer would show: after closing, and after a body that failed."""
    model = seeded(lambda: Stack(Buffers() for _ in range(3)))
    before = ModelState.of(model)
    for failure in (None, KeyError("body")):
        try:
            async with streamflow.open_offload(model) as offload:
                with torch.no_grad():
                    await offload.run(model, *CALLS[0])
                if failure is not None:
                    raise failure
        except KeyError as caught:
            assert caught is failure
        before.assert_unchanged(model)


@pytest.mark.parametrize("device", [CpuDevice, FarCpuDevice])
async def test_a_second_block_list_a_root_parameter_and_root_buffers_are_not_ignored(device: type[CpuDevice]) -> None:
    case = Case("several stacks", lambda: seeded(TwoStacks), CALLS)
    statistics = await stream_and_compare(case, device=device(), in_place=device is CpuDevice)
    assert statistics.num_blocks == 7
    assert statistics.fixed_bytes == (0 if device is CpuDevice else 3 * 256)
    model = case.build()
    assert statistics.model_bytes == sum(t.numel() * t.element_size() for t in tensors_of(model))


@pytest.mark.parametrize("kind", [Wrapped, Plain])
@pytest.mark.parametrize("where", ["block", "root", "buffer"])
async def test_a_tensor_subclass_is_refused_by_name(kind: type[torch.Tensor], where: str) -> None:
    model = mlp_stack(3)
    inner = torch.randn(WIDTH, WIDTH)
    tensor = Wrapped(inner) if kind is Wrapped else inner.as_subclass(Plain)
    if where == "buffer":
        block(model, 1).register_buffer("extra", tensor)
        name = "blocks.1.extra"
    else:
        owner = "blocks.1.up" if where == "block" else "enter"
        model.get_submodule(owner).weight = nn.Parameter(tensor, requires_grad=False)
        name = f"{owner}.weight"
    with pytest.raises(UnsupportedModelError, match=f"tensor subclass .{kind.__name__}") as caught:
        async with streamflow.open_offload(model):
            raise AssertionError("it was opened")
    assert caught.value.name == name
    assert "_compiled_call_impl" not in vars(model)


def carries_tensors(model: nn.Module) -> str:
    block(model, 1).up.weight.quant_state = torch.ones(1)
    return "blocks.1.up.weight"


def is_sparse(model: nn.Module) -> str:
    block(model, 0).register_buffer("mask", torch.eye(3).to_sparse())
    return "blocks.0.mask"


def is_conjugated(model: nn.Module) -> str:
    block(model, 0).register_buffer("phase", torch.ones(3, dtype=torch.complex64).conj())
    return "blocks.0.phase"


def is_not_initialised(model: nn.Module) -> str:
    block(model, 0).more = nn.LazyLinear(3)
    return "blocks.0.more.weight"


def has_no_values(model: nn.Module) -> str:
    model.exit = nn.LayerNorm(WIDTH, device="meta")
    return "exit.weight"


def is_from_inference_mode(model: nn.Module) -> str:
    with torch.inference_mode():
        block(model, 2).register_buffer("late", torch.ones(3))
    return "blocks.2.late"


@pytest.mark.parametrize(
    "spoil",
    [carries_tensors, is_sparse, is_conjugated, is_not_initialised, has_no_values, is_from_inference_mode],
)
async def test_what_cannot_be_repointed_exactly_is_refused_by_name(spoil: Callable[[nn.Module], str]) -> None:
    model = mlp_stack(3)
    name = spoil(model)
    with pytest.raises(UnsupportedModelError) as caught:
        async with streamflow.open_offload(model):
            raise AssertionError("it was opened")
    assert caught.value.name == name
    assert name in str(caught.value)


@pytest.mark.parametrize(("file_dtype", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
async def test_a_file_of_another_dtype_does_not_silently_replace_a_parameter(
    file_dtype: str, dtype: str, tmp_path: Path
) -> None:
    """It is converted as it is loaded, once, and the statistics say why nothing streams from the file."""
    in_file, wanted = getattr(torch, file_dtype), getattr(torch, dtype)
    save_checkpoint(seeded(Bare).to(in_file), tmp_path)
    expected = resident_digests(seeded(Bare).to(in_file).to(wanted), CALLS)
    opened = streamflow.open_streamed(lambda: seeded(lambda: Bare(wanted)), tmp_path)
    async with opened as (offload, model):
        assert {parameter.dtype for parameter in model.parameters()} == {wanted}
        await compare(offload, model, CALLS, expected)
        choice = offload.statistics().choice
    assert choice.source == "module"
    assert choice.source_reason.startswith(FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE)
    assert f"is {dtype} in the module" in choice.source_reason
    assert f"is {file_dtype}" in choice.source_reason


async def test_attributes_of_parameters_and_their_identity_survive() -> None:
    model = mlp_stack(3)
    weight = block(model, 1).up.weight
    weight.weight_loader = loader = object()
    async with streamflow.open_offload(model) as offload:
        assert block(model, 1).up.weight is weight
        with torch.no_grad():
            await offload.run(model, *CALLS[0])
        assert (weight.shape, weight.dtype) == ((WIDTH, WIDTH), torch.float32)
    assert block(model, 1).up.weight is weight
    assert weight.stride() == (WIDTH, 1)
    assert weight.weight_loader is loader


async def test_a_weight_outside_a_pass_is_poison_of_its_kind_never_stale_bytes() -> None:
    model = mlp_stack(3)
    async with streamflow.open_offload(model):
        weight = block(model, 2).up.weight  # not in the window: nothing has run
        assert (weight.shape, weight.dtype, weight.device) == ((5 * WIDTH, WIDTH), torch.float32, torch.device("cpu"))
        assert weight.isnan().all()


# Tied weights


async def test_tied_weights_stay_one_tensor_while_they_stream_and_after() -> None:
    model = TIED.build()
    weights = [block(model, index).up.weight for index in range(5)]
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model) as offload:
        await compare(offload, model, CALLS, expected)
        assert all(block(model, index).up.weight is weights[0] for index in range(5))
        state = model.state_dict()
        assert sha256_of(state["blocks.4.up.weight"]) == sha256_of(state["blocks.0.up.weight"])
    assert all(block(model, index).up.weight is weights[0] for index in range(5))


async def test_a_weight_that_blocks_or_the_root_share_is_on_the_device_once() -> None:
    statistics = await stream_and_compare(TIED, device=FarCpuDevice(), in_place=False)
    matrices, shared_buffer, enter_bias, norm = 2 * 4 * WIDTH * WIDTH, 256, 256, 2 * 256
    assert statistics.fixed_bytes == matrices + shared_buffer + enter_bias + norm


async def test_a_weight_tied_inside_a_block_is_copied_once() -> None:
    model = seeded(lambda: Stack(TiedInside() for _ in range(3)))
    statistics = await stream_and_compare(Case("tied", lambda: model, CALLS))
    weight, two_biases, memory = 4 * WIDTH * WIDTH, 2 * 256, 256
    assert statistics.block_bytes == 3 * (weight + two_biases + memory)


async def test_one_name_in_the_file_is_enough_for_two_in_the_module(tmp_path: Path) -> None:
    save_checkpoint(TIED.build(), tmp_path)
    statistics = await stream_files_and_compare(TIED, tmp_path)
    assert statistics.choice.source == "checkpoint"


async def test_any_one_of_the_names_is_enough(tmp_path: Path) -> None:
    model = TIED.build()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tied = ["enter.weight", "blocks.0.down.weight", *(f"blocks.{index}.up.weight" for index in range(5))]
    kept = {"blocks.0.down.weight", "blocks.3.up.weight"}
    shared_buffer = "blocks.3.scale"
    save_file(
        {
            name: tensor
            for name, tensor in state.items()
            if name != shared_buffer and (name not in tied or name in kept)
        },
        tmp_path / "model.safetensors",
    )
    statistics = await stream_files_and_compare(TIED, tmp_path)
    assert statistics.choice.source == "checkpoint"


async def test_both_names_in_the_file_must_agree(tmp_path: Path) -> None:
    model = TIED.build()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert (await stream_files_and_compare(TIED, tmp_path)).choice.source == "checkpoint"
    state["blocks.3.up.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    async with streamflow.open_streamed(TIED.build, tmp_path) as (offload, _):
        choice = offload.statistics().choice
    assert choice.source == "module"
    assert "differ" in choice.source_reason


async def test_a_name_that_matches_nothing_is_not_counted_as_loaded(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in mlp_stack(2).state_dict().items()}
    save_file({**state, "blocks.7.up.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnusableError, match=r"the model has no blocks\.7\.up\.weight"):
        async with streamflow.open_streamed(lambda: mlp_stack(2), tmp_path):
            raise AssertionError("it was opened")


async def test_a_name_that_nothing_provides_is_not_counted_as_loaded(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in mlp_stack(2).state_dict().items()}
    del state["blocks.1.scale"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnusableError, match=r"the files lack blocks\.1\.scale"):
        async with streamflow.open_streamed(lambda: mlp_stack(2), tmp_path):
            raise AssertionError("it was opened")


async def test_blocks_that_take_turns_with_shared_memory_in_part_do_not_break_a_checkpoint(tmp_path: Path) -> None:
    """Views of one another cannot come from a file each: the model is loaded, and the reason names them."""
    (case,) = (case for case in CASES if case.name == "tied inside a block")
    save_checkpoint(case.build(), tmp_path)
    statistics = await stream_files_and_compare(case, tmp_path)
    assert "shares memory with blocks.0.head" in statistics.choice.source_reason


async def test_a_block_in_two_lists_is_one_block() -> None:
    def build() -> nn.Module:
        model = Stack(Mlp() for _ in range(3))
        model.again = nn.ModuleList([*model.blocks, Mlp()])
        return model

    case = Case("twice", lambda: seeded(build), CALLS, streamflow.OffloadPlan(stacks=("blocks", "again")))
    assert (await stream_and_compare(case)).num_blocks == 4
