"""Tiny models on disk, in the forms that a plan is made for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from streamflow.tools.plan.model_dir import Component
from streamflow.weights.safetensors_header import TensorEntry

SaveModel = Callable[..., Path]


class Block(nn.Module):
    """A block whose tensors leave holes in its image: their sizes are odd."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x))) * self.get_buffer("scale").sum()
        return result


class TinyModel(nn.Module):
    """Eight unequal blocks between two layers that are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 13), nn.Linear(13, 5)
        self.blocks = nn.ModuleList(Block(13, hidden) for hidden in (40, 200, 40, 90, 40, 160, 40, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x)
        return result


@pytest.fixture
def build() -> Callable[[], TinyModel]:
    return TinyModel


@pytest.fixture
def tiny_model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel().eval().requires_grad_(False)


@pytest.fixture
def save_single() -> SaveModel:
    """Writes a model as one file into a folder; returns the folder."""

    def save(model: nn.Module, folder: Path, name: str = "model.safetensors") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), folder / name)
        return folder

    return save


@pytest.fixture
def save_sharded() -> SaveModel:
    """Writes a model as two shards and their index into a folder; returns the folder."""

    def save(model: nn.Module, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = list(model.state_dict().items())
        weight_map: dict[str, str] = {}
        for number, part in enumerate((tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]), 1):
            shard = f"model-{number:05}-of-00002.safetensors"
            save_file(dict(part), folder / shard)
            weight_map.update(dict.fromkeys(dict(part), shard))
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
        return folder

    return save


@pytest.fixture
def pipeline(tmp_path: Path, tiny_model: TinyModel, save_single: SaveModel, save_sharded: SaveModel) -> Path:
    """A pipeline: two components that stream, one without blocks, one in another format, two without weights."""
    folder = tmp_path / "pipeline"
    save_sharded(tiny_model, folder / "transformer")
    save_single(tiny_model, folder / "text_encoder")
    save_single(nn.Linear(3, 3), folder / "head", "diffusion_pytorch_model.safetensors")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}", encoding="utf-8")
    (folder / "checker").mkdir()
    (folder / "checker" / "pytorch_model.bin").write_bytes(b"")
    write_index(
        folder,
        {
            "_class_name": "TinyPipeline",
            "transformer": ["diffusers", "TinyModel"],
            "text_encoder": ["transformers", "TinyEncoder"],
            "head": ["diffusers", "Head"],
            "scheduler": ["diffusers", "Scheduler"],
            "checker": ["other", "Checker"],
            "absent": ["other", "Absent"],
            "image_encoder": [None, None],
            "requires_checker": False,
        },
    )
    return folder


def write_index(folder: Path, fields: Mapping[str, object]) -> None:
    (folder / "model_index.json").write_text(json.dumps(fields), encoding="utf-8")


@pytest.fixture
def component() -> Callable[[Mapping[str, int]], Component]:
    """A component of uint8 tensors of these sizes."""

    def make(sizes: Mapping[str, int]) -> Component:
        entries = {name: TensorEntry(name, "uint8", (size,), 0, size) for name, size in sizes.items()}
        return Component("model", None, "model.safetensors", entries, 1, sum(sizes.values()))

    return make
