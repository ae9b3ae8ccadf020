"""Flux and Wan transformers stream to the bytes of the resident model, loaded, and straight from their directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from streamflow.diffusers_models import diffusers_builder
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import aligned_reference, resident_digests, run_calls, stream_and_compare
from tests.streamflow.models import Case
from tests.streamflow.real_models.kit import check_documented, stream_directory, table_row, tensor_digests
from tests.streamflow.real_models.models import MODELS, VARIANTS, WAN_MODEL, DiffusersModel, Variant

pytestmark = pytest.mark.anyio

Saved = Callable[[Variant], Path]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
#: Each dtype of each model under both loops: one file under asyncio, shards under trio.
on_a_loop = pytest.mark.parametrize(
    ("variant", "anyio_backend"), [(variant, "trio" if variant.sharded else "asyncio") for variant in VARIANTS], ids=str
)
#: Each dtype of each model: once a model is loaded, nothing tells how many files it came from.
LOADED = [variant for variant in VARIANTS if variant.sharded == (variant.dtype == torch.bfloat16)]
BFLOAT16_SHARDS = [variant for variant in VARIANTS if variant.sharded and variant.dtype == torch.bfloat16]


def case_of(variant: Variant, directory: Path) -> Case:
    """The loaded model, moved to aligned addresses.

    Its loader leaves it wherever the file has it, and there stays what is outside the blocks if the host is the device.
    """
    return Case(str(variant), lambda: aligned_reference(variant.model.load(directory, variant.dtype)), variant.calls)


@pytest.mark.parametrize(
    ("variant", "anyio_backend"), [(variant, "trio" if variant.sharded else "asyncio") for variant in LOADED], ids=str
)
async def test_a_loaded_model_streams_exactly(variant: Variant, saved: Saved) -> None:
    statistics = await stream_and_compare(case_of(variant, saved(variant)))
    assert statistics.choice.source == "module"
    assert statistics.num_blocks == len(variant.model.block_paths)
    assert statistics.engine.device_peak_bytes < statistics.model_bytes / 2
    check_documented(table_row(variant.model.name, variant.dtype_name, "open_offload", statistics))


@on_a_loop
async def test_a_model_streams_exactly_from_its_directory(variant: Variant, saved: Saved) -> None:
    directory = saved(variant)
    resident = variant.model.load(directory, variant.dtype)
    build = diffusers_builder(directory, variant.dtype)
    statistics = await stream_directory(directory, build, resident, variant.calls)
    assert statistics.choice.source == "checkpoint", statistics.choice.source_reason
    assert statistics.num_blocks == len(variant.model.block_paths)
    assert statistics.host_image_bytes == 0
    check_documented(table_row(variant.model.name, variant.dtype_name, "open_streamed", statistics))


@pytest.mark.parametrize("variant", BFLOAT16_SHARDS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"transfer": "staged", "staging_chunk_bytes": 4096, "packing_threads": 2},
        {"window_blocks": 1, "resident_blocks": 3},
        {"window_blocks": 3, "resident_blocks": 1, "resident_placement": "leading"},
    ],
    ids=["staged", "one slot and residents", "three slots"],
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_options_leave_the_bytes_as_they_are(variant: Variant, options: dict[str, Any], saved: Saved) -> None:
    directory = saved(variant)
    resident = variant.model.load(directory, variant.dtype)
    build = diffusers_builder(directory, variant.dtype)
    statistics = await stream_directory(directory, build, resident, variant.calls, options)
    assert statistics.choice.source == "checkpoint"
    assert statistics.num_resident_blocks == options.get("resident_blocks", 0)
    assert statistics.choice.transfer == options.get("transfer", "direct")


@pytest.mark.parametrize("variant", BFLOAT16_SHARDS, ids=str)
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_device_apart_from_the_host_gets_what_is_outside_the_blocks_too(variant: Variant, saved: Saved) -> None:
    directory = saved(variant)
    case = case_of(variant, directory)
    statistics = await stream_and_compare(case, device=FarCpuDevice(), in_place=False)
    assert statistics.fixed_bytes > 0
    assert statistics.host_image_bytes == statistics.block_bytes
    build = diffusers_builder(directory, variant.dtype)
    statistics = await stream_directory(directory, build, case.build(), variant.calls, device=FarCpuDevice())
    assert (statistics.choice.source, statistics.choice.transfer) == ("checkpoint", "staged")
    assert statistics.fixed_bytes > 0
    assert statistics.host_image_bytes == 0


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_models_use_every_block_and_tell_inputs_apart(model: DiffusersModel) -> None:
    """Or equal outputs would show nothing: each walk has its own finite output, and so has each change of a block."""
    module, calls = model.build(), model.calls(torch.float32)
    digests = resident_digests(module, calls)
    assert len(set(digests)) == len(calls)
    assert all(output.sample.isfinite().all() for output in run_calls(module, calls))
    for path in model.block_paths:
        with torch.no_grad():
            block = module.get_submodule(path)
            next(tensor for tensor in block.parameters() if tensor.dim() == 2).mul_(1.5)
        changed = resident_digests(module, calls[:1])
        assert changed != digests[:1], f"{path} changes nothing"
        digests[0] = changed[0]


@each_variant
def test_the_saved_files_are_what_they_are_called(variant: Variant, saved: Saved) -> None:
    files = sorted(saved(variant).glob("*.safetensors"))
    assert len(files) == 1 if not variant.sharded else len(files) >= 4
    assert len(list(saved(variant).glob("*.index.json"))) == variant.sharded
    assert json.loads((saved(variant) / "config.json").read_text())["_class_name"] == variant.model.model_class.__name__


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.model is WAN_MODEL], ids=str)
def test_the_files_of_wan_mix_dtypes_where_its_parameters_are_kept_in_float32(variant: Variant, saved: Saved) -> None:
    dtypes: dict[str, str] = {}
    for file in saved(variant).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            dtypes |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    if variant.dtype == torch.float32:
        assert set(dtypes.values()) == {"F32"}
        return
    kept = {name for name, dtype in dtypes.items() if dtype == "F32"}
    assert {"scale_shift_table", "blocks.0.scale_shift_table", "blocks.6.norm2.weight"} < kept
    assert "condition_embedder.time_embedder.linear_1.weight" in kept
    assert {dtypes[name] for name in dtypes if name not in kept} == {"BF16"}
    assert len(kept) < len(dtypes) / 2


@each_variant
def test_sharded_blocks_lie_in_several_files(variant: Variant, saved: Saved) -> None:
    if variant.sharded:
        (index,) = saved(variant).glob("*.index.json")
        weight_map = json.loads(index.read_text())["weight_map"]
        homes = [
            {file for name, file in weight_map.items() if name.startswith(f"{path}.")}
            for path in variant.model.block_paths
        ]
        assert any(len(files) > 1 for files in homes)
    else:
        module = variant.model.load(saved(variant), variant.dtype)
        assert isinstance(module, nn.Module)
        assert tensor_digests(module).keys() == tensor_digests(variant.model.build()).keys()
