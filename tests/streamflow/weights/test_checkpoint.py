"""Files, directories and shards: what opens, what is refused, and that nothing stays open."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamflow.weights import checkpoint as checkpoint_module
from streamflow.weights.checkpoint import open_checkpoint
from streamflow.weights.checkpoint_choice import choose_checkpoint
from streamflow.weights.errors import (
    CheckpointAmbiguousError,
    CheckpointFormatError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CheckpointOpenError,
)
from streamflow.weights.tensor_reading import read_tensor, view_bytes

Save = Callable[..., Path]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(save: Save, tmp_path: Path) -> Path:
    save({"a": torch.arange(10.0), "b": torch.ones(3)}, SHARDS[0])
    save({"c": torch.zeros(0, 2), "d": torch.tensor(5)}, SHARDS[1])
    write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1], "d": SHARDS[1]})
    return tmp_path


def write_index(directory: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> None:
    (directory / name).write_text(json.dumps({"metadata": {"total_size": 60}, "weight_map": weight_map}))


def test_a_file_opens(save: Save) -> None:
    path = save({"a": torch.arange(10.0), "b": torch.ones(3)}, "anything.safetensors")
    with open_checkpoint(path) as checkpoint:
        (file,) = checkpoint.files
        assert checkpoint.path == file.path == str(path)
        assert set(checkpoint.tensors) == set(checkpoint.entries) == {"a", "b"}
        assert checkpoint.tensors["a"].file is file
        assert checkpoint.entries["a"] is checkpoint.tensors["a"].entry
        assert checkpoint.weight_bytes == 52
        assert checkpoint.file_bytes == path.stat().st_size
    assert file.closed


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.safetensors", "only.safetensors"])
def test_a_directory_with_one_file_opens(save: Save, tmp_path: Path, name: str) -> None:
    save({"a": torch.ones(1)}, name)
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == str(tmp_path / name)


@pytest.mark.parametrize("target", ["", "model.safetensors.index.json"])
def test_shards_open_through_their_index(sharded: Path, target: str) -> None:
    with open_checkpoint(sharded / target) as checkpoint:
        assert [Path(file.path).name for file in checkpoint.files] == list(SHARDS)
        assert set(checkpoint.tensors) == {"a", "b", "c", "d"}
        found = checkpoint.tensors["d"]
        assert Path(found.file.path).name == SHARDS[1]
        assert read_tensor(found.file, found.entry).item() == 5
        assert checkpoint.weight_bytes == 60
    assert all(file.closed for file in checkpoint.files)


def test_an_index_in_the_working_directory_opens(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sharded)
    with open_checkpoint("model.safetensors.index.json") as checkpoint:
        assert len(checkpoint.tensors) == 4


def test_files_of_another_precision_beside_an_index_are_left_alone(sharded: Path, save: Save) -> None:
    save({"a": torch.ones(1)}, "model.fp16.safetensors")
    with open_checkpoint(sharded) as checkpoint:
        assert "model.fp16" not in " ".join(file.path for file in checkpoint.files)


@pytest.mark.parametrize(
    ("names", "listed", "candidates"),
    [
        (["a.safetensors", "b.safetensors"], (), ("a.safetensors", "b.safetensors")),
        (
            ["model.safetensors", "diffusion_pytorch_model.safetensors"],
            (),
            ("model.safetensors", "diffusion_pytorch_model.safetensors"),
        ),
        (
            ["model.safetensors", "m-1.safetensors", "model.safetensors.index.json"],
            ("m-1.safetensors",),
            ("model.safetensors.index.json", "model.safetensors"),
        ),
        (
            ["x.safetensors.index.json", "y.safetensors.index.json", "m.safetensors"],
            ("m.safetensors",),
            ("x.safetensors.index.json", "y.safetensors.index.json"),
        ),
    ],
)
def test_several_checkpoints_in_a_directory_are_listed(
    names: list[str], listed: tuple[str, ...], candidates: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointAmbiguousError, match="give the path of one of these files") as caught:
        choose_checkpoint("dir", names, lambda index: listed)
    assert caught.value.candidates == candidates
    assert all(candidate in str(caught.value) for candidate in candidates)


def test_a_well_known_name_that_the_index_lists_is_a_shard() -> None:
    names = ["model.safetensors", "model.safetensors.index.json"]
    assert choose_checkpoint("dir", names, lambda index: {"model.safetensors"}) == names[1]


def test_a_well_known_file_is_chosen_before_others() -> None:
    names = ["model.fp16.safetensors", "model.safetensors"]
    assert choose_checkpoint("dir", names, lambda index: ()) == "model.safetensors"


def test_nothing_to_open_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"holds no \*\.safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="give the folder of one of its components"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no such file or directory"):
        open_checkpoint(tmp_path / "missing")
    for name in ("missing.safetensors", "missing.safetensors.index.json"):
        with pytest.raises(CheckpointNotFoundError, match=f"{name}: there is no such"):
            open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointFormatError, match=r"a directory, a \*\.safetensors or .* is expected"):
        open_checkpoint(tmp_path / "model_index.json")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"{SHARDS[1]}: this shard is missing although .* lists it"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/m.safetensors",
        "..",
        ".safetensors",
        "",
        "m.bin",
        1,
        None,
        "a\\m.safetensors",
        "m\x00.safetensors",
    ],
)
def test_an_index_may_only_name_plain_files_beside_it(sharded: Path, shard: object) -> None:
    write_index(sharded, {"a": SHARDS[0], "b": shard})
    with pytest.raises(CheckpointFormatError, match=r"tensor 'b' is said to be in .* plain \*\.safetensors"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[]", "an object was expected"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' comes twice"),
        ("{}", "weight_map must be an object"),
        ('{"weight_map": {}}', "weight_map must be an object"),
        ('{"weight_map": ["a"]}', "weight_map must be an object"),
    ],
)
def test_a_broken_index_is_refused(sharded: Path, text: str, words: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointFormatError, match=words) as caught:
        open_checkpoint(sharded)
    assert caught.value.path.endswith("model.safetensors.index.json")


def test_an_index_over_the_limit_is_refused(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "MAX_INDEX_BYTES", 100)
    with pytest.raises(CheckpointFormatError, match="larger than the limit of 100 bytes"):
        open_checkpoint(sharded)


def test_an_index_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointOpenError, match="not a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}, f"listed tensors are missing: 'e' in {SHARDS[1]}"),
        ({"a": 0, "b": 1, "c": 1, "d": 1}, f"listed tensors are missing: 'b' in {SHARDS[1]}"),
        ({"a": 0, "c": 1, "d": 1}, rf"'b' in {SHARDS[0]} \(the index says nothing of it\)"),
    ],
)
def test_index_and_shards_must_agree(
    sharded: Path, weight_map: dict[str, int], words: str, open_fds: Callable[[], set[str]]
) -> None:
    write_index(sharded, {name: SHARDS[shard] for name, shard in weight_map.items()})
    with pytest.raises(CheckpointFormatError, match=words):
        open_checkpoint(sharded)
    assert not any(target.startswith(str(sharded)) for target in open_fds())


def test_a_tensor_in_two_shards_is_refused(sharded: Path, save: Save) -> None:
    save({"a": torch.arange(10.0), "c": torch.zeros(0, 2), "d": torch.tensor(5)}, SHARDS[1])
    with pytest.raises(CheckpointFormatError, match=rf"'a' in {SHARDS[1]} \(the index says {SHARDS[0]}\)"):
        open_checkpoint(sharded)


def test_a_broken_shard_is_named_and_the_others_are_closed(sharded: Path, open_fds: Callable[[], set[str]]) -> None:
    os.truncate(sharded / SHARDS[1], 20)
    with pytest.raises(CheckpointFormatError, match=f"{SHARDS[1]}: the file ends inside its header"):
        open_checkpoint(sharded)
    assert not any(target.startswith(str(sharded)) for target in open_fds())


def test_long_lists_of_names_are_cut(sharded: Path) -> None:
    write_index(sharded, {f"t{i}": SHARDS[0] for i in range(50)})
    with pytest.raises(CheckpointFormatError, match="and 46 more; download") as caught:
        open_checkpoint(sharded)
    assert len(str(caught.value)) < 600


def test_closing_closes_every_file_that_it_can(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    first, second = checkpoint.files
    view = view_bytes(first, 0, 8)
    for _ in range(2):
        with pytest.raises(CheckpointInUseError, match=SHARDS[0]):
            checkpoint.close()
        assert (first.closed, second.closed) == (False, True)
    del view
    checkpoint.close()
    assert first.closed


def test_equal_bytes_are_proven_by_reading(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_COMPARE_BYTES", 16)
    ten = torch.arange(10.0)
    other = ten.clone()
    other[9] = 0
    path = save(
        {"a": ten, "same": ten.clone(), "other": other, "shape": ten.reshape(2, 5).clone(), "type": ten.int()}
        | {"nan": torch.tensor(torch.nan), "nan too": torch.tensor(torch.nan), "minus": torch.tensor(-0.0)}
        | {"plus": torch.tensor(0.0), "empty": torch.empty(0), "empty too": torch.empty(0)}
    )
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.same_bytes("a", "same")
        assert checkpoint.same_bytes("nan", "nan too")
        assert checkpoint.same_bytes("empty", "empty too")
        assert not checkpoint.same_bytes("a", "other")
        assert not checkpoint.same_bytes("a", "shape")
        assert not checkpoint.same_bytes("a", "type")
        assert not checkpoint.same_bytes("minus", "plus")
        with pytest.raises(KeyError):
            checkpoint.same_bytes("a", "missing")
