"""The checkpoint that ships with the package, and files that are not one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamflow.tools.demo import checkpoint
from streamflow.tools.demo.checkpoint import (
    DESCRIPTION_NAME,
    WEIGHTS_NAME,
    demo_checkpoint_dir,
    load_demo_model,
    read_description,
    save_checkpoint,
)
from streamflow.tools.demo.digits import load_split
from streamflow.tools.demo.errors import DemoCheckpointError
from streamflow.tools.demo.model import DigitTransformer, DigitTransformerConfig

MAX_CHECKPOINT_BYTES = 3_000_000


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the shipped checkpoint, to damage."""
    return Path(shutil.copytree(demo_checkpoint_dir(), tmp_path / "copy"))


def edit_description(directory: Path, **fields: object) -> None:
    path = directory / DESCRIPTION_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_shipped_checkpoint_is_small_and_float32() -> None:
    assert (demo_checkpoint_dir() / WEIGHTS_NAME).stat().st_size <= MAX_CHECKPOINT_BYTES
    assert {tensor.dtype for tensor in load_file(demo_checkpoint_dir() / WEIGHTS_NAME).values()} == {torch.float32}


def test_the_loaded_model_has_the_files_weights_in_memory_of_its_own_and_is_in_eval_mode(copied: Path) -> None:
    model = load_demo_model(copied)
    weights = load_file(demo_checkpoint_dir() / WEIGHTS_NAME)
    (copied / WEIGHTS_NAME).write_bytes(bytes((copied / WEIGHTS_NAME).stat().st_size))
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not model.training


def test_the_shipped_checkpoint_says_what_it_has_seen_and_the_split_still_gives_the_same() -> None:
    training = read_description(demo_checkpoint_dir()).training
    assert load_split(training["split_seed"]).generator.digest == training["seen_samples_sha256"]


def test_what_is_saved_is_loaded(tmp_path: Path, small_config: DigitTransformerConfig) -> None:
    model = DigitTransformer(small_config)
    save_checkpoint(model, {"seed": 3}, tmp_path / "new" / "folder")
    loaded = load_demo_model(tmp_path / "new" / "folder")
    assert loaded.config == small_config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert read_description(tmp_path / "new" / "folder").training == {"seed": 3}


def test_a_package_without_its_data_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "WEIGHTS_NAME", "absent.safetensors")
    with pytest.raises(DemoCheckpointError, match=r"absent\.safetensors.*reinstall"):
        demo_checkpoint_dir()


@pytest.mark.parametrize("name", [WEIGHTS_NAME, DESCRIPTION_NAME])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_a_missing_or_damaged_file_is_named(copied: Path, name: str, damage: str) -> None:
    path = copied / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else content[:-20])
    with pytest.raises(DemoCheckpointError, match=r"streamflow\.tools\.demo\.train") as caught:
        load_demo_model(copied)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "fields",
    [
        {"speed": 3},
        {"config": {"width": 64, "colour": True}},
        {"config": {"width": 63}},
        {"config": [64]},
    ],
)
def test_an_unknown_or_impossible_field_of_the_description_is_refused(copied: Path, fields: dict[str, object]) -> None:
    edit_description(copied, **fields)
    with pytest.raises(DemoCheckpointError, match="cannot be read"):
        load_demo_model(copied)


def test_weights_that_do_not_fit_the_sizes_are_refused(copied: Path) -> None:
    edit_description(copied, config={"num_blocks": 11})
    with pytest.raises(DemoCheckpointError, match=r"blocks\.11"):
        load_demo_model(copied)


def test_a_weight_that_is_missing_from_the_file_is_named(copied: Path) -> None:
    weights = load_file(copied / WEIGHTS_NAME)
    save_file({name: tensor for name, tensor in weights.items() if name != "position"}, copied / WEIGHTS_NAME)
    with pytest.raises(DemoCheckpointError, match="position"):
        load_demo_model(copied)
