"""Checkpoints whose tensors an adapter makes into the model's while blocks are read: exact, staged, and said so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import streamflow
from streamflow.errors import CheckpointUnusableError, ConfigurationError
from streamflow.weights.adapters import CheckpointAdapter, DropAdapter, GroupedQKVAdapter, RenameAdapter, TensorAdapter
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.models import Call, seeded, some_inputs
from tests.streamflow.real_models.kit import stream_directory

pytestmark = pytest.mark.anyio

HEADS, GROUPS, HEAD, WIDTH, NUM_BLOCKS = 6, 2, 4, 24, 5
CALLS: tuple[Call, ...] = tuple((x,) for x in some_inputs(width=WIDTH))


class Attention(nn.Module):
    """Attention with grouped keys and values from one projection: all queries, then all keys, then all values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD)).transpose(0, 1)
        query, key, value = fused.split([HEADS, GROUPS, GROUPS])
        key, value = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (key, value))
        attended = functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        out: torch.Tensor = x + self.out(attended.transpose(0, 1).flatten(1))
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x


def grouped(fused: torch.Tensor) -> torch.Tensor:
    """The rows as such checkpoints have them: for each group its queries, its key, its value. Row by row, by hand."""
    heads = list(fused.split(HEAD))
    rows = []
    for group in range(GROUPS):
        each = HEADS // GROUPS
        rows += heads[group * each : (group + 1) * each]
        rows += [heads[HEADS + group], heads[HEADS + GROUPS + group]]
    return torch.cat(rows)


def model() -> nn.Module:
    return seeded(Decoder)


def save_grouped(directory: Path, *, prefix: str = "", extra: dict[str, torch.Tensor] | None = None) -> None:
    state = model().state_dict()
    stored = {name: grouped(tensor) if ".qkv." in name else tensor.clone() for name, tensor in state.items()}
    assert not torch.equal(stored["layers.0.qkv.weight"], state["layers.0.qkv.weight"])
    tensors = {prefix + name: tensor for name, tensor in {**stored, **(extra or {})}.items()}
    save_file(tensors, directory / "model.safetensors")


QKV = GroupedQKVAdapter("layers.*.qkv.*", num_heads=HEADS, num_kv_groups=GROUPS)
NUM_ADAPTED = 2 * NUM_BLOCKS


async def test_grouped_projections_stream_exactly_and_the_statistics_tell(tmp_path: Path) -> None:
    save_grouped(tmp_path)
    statistics = await stream_directory(tmp_path, model, model(), CALLS, adapters=[QKV])
    choice = statistics.choice
    assert choice.source == "checkpoint"
    assert choice.source_reason.endswith(f", {NUM_ADAPTED} of them through checkpoint adapters")
    assert choice.transfer == "staged"
    assert "checkpoint adapters make tensors" in choice.transfer_reason
    assert statistics.num_blocks == NUM_BLOCKS


@pytest.mark.parametrize("options", [{"resident_blocks": 2}, {"window_blocks": 1, "packing_threads": 3}], ids=str)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_grouped_projections_stream_exactly_to_a_device_apart(options: dict[str, Any], tmp_path: Path) -> None:
    save_grouped(tmp_path)
    options = {"staging_chunk_bytes": 256, **options}
    statistics = await stream_directory(tmp_path, model, model(), CALLS, options, adapters=[QKV], device=FarCpuDevice())
    assert (statistics.choice.source, statistics.choice.transfer) == ("checkpoint", "staged")


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_adapters_of_every_kind_together(tmp_path: Path) -> None:
    save_grouped(tmp_path, prefix="decoder.", extra={"head.weight": torch.zeros(2)})
    adapters: list[CheckpointAdapter] = [
        GroupedQKVAdapter("layers.*.qkv.*", ("decoder.layers.*.qkv.*",), num_heads=HEADS, num_kv_groups=GROUPS),
        TensorAdapter("enter.bias", ("decoder.enter.bias",), transform=lambda tensors: tensors[0] + 1),
        DropAdapter(("decoder.head.*",)),
        RenameAdapter(prefixes={"decoder.": ""}),
    ]
    resident = model()
    with torch.no_grad():
        resident.get_parameter("enter.bias").add_(1)
    statistics = await stream_directory(tmp_path, model, resident, CALLS, adapters=adapters)
    assert statistics.choice.source == "checkpoint"
    assert statistics.choice.source_reason.endswith(f", {NUM_ADAPTED + 1} of them through checkpoint adapters")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_same_shapes_without_the_adapter_are_another_model(tmp_path: Path) -> None:
    """The names and shapes agree, so that only the caller can know; the comparison does see it."""
    save_grouped(tmp_path)
    with pytest.raises(AssertionError):
        await stream_directory(tmp_path, model, model(), CALLS)


async def test_a_direct_transfer_through_adapters_is_refused_before_anything_runs(tmp_path: Path) -> None:
    save_grouped(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'direct' is not possible: checkpoint adapters.*transfer='auto'"):
        async with streamflow.open_streamed(model, tmp_path, {"transfer": "direct"}, adapters=[QKV]):
            pytest.fail("it opened")


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (GroupedQKVAdapter("layers.*.qkv.*", num_heads=HEADS, num_kv_groups=3), "cannot be cut into 12 heads"),
        (GroupedQKVAdapter("layers.*.kqv.*", num_heads=HEADS, num_kv_groups=GROUPS), "matches no tensor"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_by_name(
    adapter: GroupedQKVAdapter, words: str, tmp_path: Path
) -> None:
    save_grouped(tmp_path)
    with pytest.raises(CheckpointUnusableError, match=words) as caught:
        async with streamflow.open_streamed(model, tmp_path, adapters=[adapter]):
            pytest.fail("it opened")
    assert "pass load=" in caught.value.problem
    assert "GroupedQKVAdapter" in caught.value.reason
