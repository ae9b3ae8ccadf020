"""Checkpoints that cannot be streamed as they lie: loaded and exact, with the code and the reason, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import streamflow
from streamflow.diffusers_models import diffusers_builder
from streamflow.errors import CheckpointUnusableError
from tests.streamflow.kit import aligned_reference, streamflow_threads
from tests.streamflow.models import CALLS, WIDTH, Mlp, seeded
from tests.streamflow.real_models.kit import stream_directory, tensor_digests
from tests.streamflow.real_models.models import FLUX_MODEL, MODELS, WAN_MODEL, DiffusersModel, Variant

pytestmark = pytest.mark.anyio

Saved = Callable[[Variant], Path]
#: How weights can be loaded so that no file has them as the model needs them: options, code.
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"topology": {"tensor_parallel_size": 2}}, "unsupported_tp"),
    ({"topology": {"hsdp": True}}, "unsupported_hsdp"),
    ({"topology": {"online_quantization": "fp8"}}, "unsupported_online_quantization"),
]
each_unsupported = pytest.mark.parametrize(("options", "code"), UNSUPPORTED, ids=[code for _, code in UNSUPPORTED])
INCOMPATIBLE = "checkpoint_plan_incompatible"


def load_aligned(model: DiffusersModel, directory: Path, dtype: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    """A ``load`` that is the model's own ``from_pretrained``, the weights at aligned addresses."""
    return lambda skeleton: aligned_reference(model.load(directory, dtype))


async def refuse(directory: Path, build: Callable[[], nn.Module], options: dict[str, Any]) -> CheckpointUnusableError:
    """The error with which opening fails; nothing is left open."""
    threads = streamflow_threads()
    with pytest.raises(CheckpointUnusableError) as caught:
        async with streamflow.open_streamed(build, directory, options):
            pytest.fail("it opened")
    assert streamflow_threads() == threads
    return caught.value


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize(
    ("stored", "dtype", "sharded"),
    [
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_files_of_another_dtype_are_loaded_and_converted_as_from_pretrained_does(
    model: DiffusersModel, stored: torch.dtype, dtype: torch.dtype, sharded: bool, saved: Saved
) -> None:
    directory = saved(Variant(model, stored, sharded))
    resident = model.load(directory, dtype)
    build = diffusers_builder(directory, dtype)
    statistics = await stream_directory(directory, build, resident, model.calls(dtype))
    choice = statistics.choice
    assert choice.source == "module"
    assert choice.source_reason.startswith(f"{INCOMPATIBLE}: parameter '")
    names = [str(kind).removeprefix("torch.") for kind in (dtype, stored)]
    assert f"is {names[0]} in the module" in choice.source_reason
    assert f"is {names[1]}; a checkpoint source never converts" in choice.source_reason


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_bfloat16_file_for_a_float32_module_equals_its_converted_state_dict(saved: Saved) -> None:
    directory = saved(Variant(FLUX_MODEL, torch.bfloat16, sharded=False))
    (file,) = directory.glob("*.safetensors")
    resident = FLUX_MODEL.build()
    resident.load_state_dict({name: tensor.float() for name, tensor in load_file(file).items()})
    assert {tensor.dtype for tensor in resident.state_dict().values()} == {torch.float32}
    calls = FLUX_MODEL.calls(torch.float32)
    statistics = await stream_directory(directory, FLUX_MODEL.build, resident, calls)
    assert statistics.choice.source == "module"
    assert statistics.choice.source_reason.startswith(INCOMPATIBLE)


def with_extra(directory: Path, target: Path) -> None:
    """A copy of a checkpoint of one file with tensors in it that the model does not have."""
    shutil.copytree(directory, target)
    (file,) = target.glob("*.safetensors")
    save_file({**load_file(file), "vae.conv.weight": torch.zeros(3), "vae.conv.bias": torch.zeros(1)}, file)


async def test_a_file_that_holds_other_weights_too_is_refused_with_their_names(saved: Saved, tmp_path: Path) -> None:
    with_extra(saved(Variant(WAN_MODEL, torch.bfloat16, sharded=False)), tmp_path / "mixed")
    refusal = await refuse(tmp_path / "mixed", diffusers_builder(tmp_path / "mixed", torch.bfloat16), {})
    assert refusal.code == INCOMPATIBLE
    assert "'vae.conv.weight'" in refusal.reason
    assert "the model has no vae.conv" in refusal.problem


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_file_that_holds_other_weights_too_streams_once_it_is_loaded(saved: Saved, tmp_path: Path) -> None:
    directory = tmp_path / "mixed"
    with_extra(saved(Variant(WAN_MODEL, torch.bfloat16, sharded=False)), directory)
    load = load_aligned(WAN_MODEL, directory, torch.bfloat16)
    build = diffusers_builder(directory, torch.bfloat16)
    statistics = await stream_directory(directory, build, load(build()), WAN_MODEL.calls(torch.bfloat16), load=load)
    assert statistics.choice.source == "module"
    assert statistics.choice.source_reason.startswith(f"{INCOMPATIBLE}: 2 tensors of the checkpoint match nothing")


@each_unsupported
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_weights_that_are_split_or_converted_while_loading_stream_once_they_are_loaded(
    options: dict[str, Any], code: str, saved: Saved
) -> None:
    directory = saved(Variant(FLUX_MODEL, torch.bfloat16, sharded=True))
    load = load_aligned(FLUX_MODEL, directory, torch.bfloat16)
    given: list[nn.Module] = []

    def load_and_remember(skeleton: nn.Module) -> nn.Module:
        given.append(skeleton)
        return load(skeleton)

    build = diffusers_builder(directory, torch.bfloat16)
    statistics = await stream_directory(
        directory, build, load(build()), FLUX_MODEL.calls(torch.bfloat16), options, load=load_and_remember
    )
    assert statistics.choice.source == "module"
    assert statistics.choice.source_reason.startswith(f"{code}: ")
    (skeleton,) = given
    assert all(parameter.is_meta for parameter in skeleton.parameters())


@each_unsupported
async def test_without_a_way_to_load_them_they_are_refused(options: dict[str, Any], code: str, saved: Saved) -> None:
    directory = saved(Variant(FLUX_MODEL, torch.bfloat16, sharded=False))
    refusal = await refuse(directory, diffusers_builder(directory, torch.bfloat16), options)
    assert refusal.code == code
    assert "pass load=" in refusal.problem
    assert str(directory) in refusal.path
    assert isinstance(refusal, ValueError)


async def test_an_unsupported_way_comes_before_the_other_reasons(saved: Saved, tmp_path: Path) -> None:
    with_extra(saved(Variant(WAN_MODEL, torch.bfloat16, sharded=False)), tmp_path / "mixed")
    build = diffusers_builder(tmp_path / "mixed", torch.bfloat16)
    assert (await refuse(tmp_path / "mixed", build, {"topology": {"tensor_parallel_size": 8}})).code == "unsupported_tp"


class Filled(nn.Module):
    """Fills a buffer that no file holds, in uninitialised memory: a skeleton has no such memory."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        mask = torch.empty(WIDTH)
        self.register_buffer("mask", mask.fill_(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.mask


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_buffer_that_only_a_real_build_fills_is_never_taken_for_computed(tmp_path: Path) -> None:
    resident = seeded(Filled)
    save_file(resident.state_dict(), tmp_path / "model.safetensors")
    refusal = await refuse(tmp_path, Filled, {})
    assert refusal.code == INCOMPATIBLE
    assert "nothing gives the non-persistent buffer mask its values (pass load=)" in refusal.problem

    def load(skeleton: nn.Module) -> nn.Module:
        return seeded(Filled)

    statistics = await stream_directory(tmp_path, Filled, resident, CALLS, load=load)
    assert statistics.choice.source == "module"
    assert "non-persistent buffer mask" in statistics.choice.source_reason


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_model_that_was_loaded_keeps_its_weights_after_closing(model: DiffusersModel, saved: Saved) -> None:
    directory = saved(Variant(model, torch.float32, sharded=False))
    resident = model.load(directory, torch.bfloat16)
    build = diffusers_builder(directory, torch.bfloat16)
    async with streamflow.open_streamed(build, directory) as (_, streamed):
        pass
    assert tensor_digests(streamed) == tensor_digests(resident)
    async with streamflow.open_streamed(diffusers_builder(directory, torch.float32), directory) as (_, streamed):
        pass
    assert any(tensor.is_meta for tensor in streamed.state_dict().values())
