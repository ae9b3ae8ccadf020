"""Finding the components of a model on disk, and what is said of what is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from streamflow.stages.errors import StreamflowError
from streamflow.tools.plan.model_dir import read_model_dir
from streamflow.weights.errors import (
    CheckpointAmbiguousError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CheckpointOpenError,
)

SaveModel = Callable[..., Path]


def test_a_folder_a_file_and_an_index_are_the_same_model(
    tmp_path: Path, tiny_model: nn.Module, save_single: SaveModel, save_sharded: SaveModel
) -> None:
    single = save_single(tiny_model, tmp_path / "single")
    sharded = save_sharded(tiny_model, tmp_path / "sharded")
    paths = [single, single / "model.safetensors", sharded, sharded / "model.safetensors.index.json"]
    found = [read_model_dir(path) for path in paths]
    for model in found:
        (component,) = model.components
        assert not model.is_pipeline
        assert component.kind is None
        assert component.entries.keys() == tiny_model.state_dict().keys()
        assert component.weight_bytes == sum(tensor.nbytes for tensor in tiny_model.state_dict().values())
    assert [model.components[0].name for model in found] == [path.name for path in paths]
    assert [model.components[0].num_files for model in found] == [1, 1, 2, 2]


def test_a_component_is_named_by_its_real_folder(
    tmp_path: Path, tiny_model: nn.Module, save_single: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(save_single(tiny_model, tmp_path / "transformer"))
    assert read_model_dir(Path()).components[0].name == "transformer"


def test_a_pipeline_has_its_components_and_says_what_it_leaves_out(pipeline: Path) -> None:
    model = read_model_dir(pipeline)
    assert model.is_pipeline
    assert [(component.name, component.kind, component.num_files) for component in model.components] == [
        ("transformer", "TinyModel", 2),
        ("text_encoder", "TinyEncoder", 1),
        ("head", "Head", 1),
    ]
    assert [(left.name, left.kind, left.reason) for left in model.left_out] == [
        ("checker", "Checker", "its weights are not in safetensors files but in pytorch_model.bin"),
        ("absent", "Absent", "its folder is not there"),
    ]


def test_nothing_stays_open(pipeline: Path) -> None:
    def open_files() -> set[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return {str(link.readlink()) for link in links if link.is_symlink()}

    read_model_dir(pipeline)
    assert not [path for path in open_files() if str(pipeline) in path]


def broken_component(folder: Path, pipeline: Path) -> Path:
    (pipeline / "transformer" / "model-00002-of-00002.safetensors").unlink()
    return pipeline


def truncated(folder: Path, pipeline: Path) -> Path:
    path = pipeline / "text_encoder" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    return path


def index_of(fields: object) -> Callable[[Path, Path], Path]:
    def make(folder: Path, pipeline: Path) -> Path:
        (folder / "model_index.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
        return folder

    return make


def folder_with(*names: str) -> Callable[[Path, Path], Path]:
    def make(folder: Path, pipeline: Path) -> Path:
        for name in names:
            (folder / name).write_bytes(b"")
        return folder

    return make


def two_checkpoints(folder: Path, pipeline: Path) -> Path:
    content = (pipeline / "text_encoder" / "model.safetensors").read_bytes()
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(content)
    return folder


def unreadable_index(folder: Path, pipeline: Path) -> Path:
    index = folder / "model_index.json"
    index.symlink_to("/proc/self/mem")
    return folder


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda folder, _: folder / "gone", CheckpointNotFoundError, "no such file or folder; give a model's folder"),
        (folder_with(), CheckpointNotFoundError, r"holds no \*.safetensors file; give a model's folder"),
        (folder_with("model.bin"), CheckpointNotFoundError, "but in model.bin; save them as safetensors first"),
        (
            lambda folder, _: folder.parent / "parent",
            CheckpointNotFoundError,
            "its folders inner do; give one of these",
        ),
        (lambda _, pipeline: pipeline / "scheduler" / "scheduler_config.json", CheckpointFormatError, "is expected"),
        (truncated, CheckpointFormatError, "7 bytes are missing at the end; copy or download it again"),
        (broken_component, CheckpointNotFoundError, "this shard is missing although"),
        (two_checkpoints, CheckpointAmbiguousError, "a.safetensors, b.safetensors; give the path of one"),
        (index_of("{"), CheckpointFormatError, "model_index.json: it is not valid JSON"),
        (index_of({"../x": ["a", "b"]}), CheckpointFormatError, "'../x' is no plain folder name"),
        (index_of({"a": ["b", "C"]}), CheckpointNotFoundError, "no component of this pipeline has .* a: its folder is"),
        (unreadable_index, CheckpointOpenError, "it cannot be read"),
    ],
)
def test_what_is_no_model_is_a_typed_error(
    tmp_path: Path,
    pipeline: Path,
    save_single: SaveModel,
    make: Callable[[Path, Path], Path],
    error: type[StreamflowError],
    words: str,
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_single(nn.Linear(2, 2), tmp_path / "parent" / "inner")
    path = make(folder, pipeline)
    with pytest.raises(error, match=words) as caught:
        read_model_dir(path)
    assert "\n" not in str(caught.value)
