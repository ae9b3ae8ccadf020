"""The source identity: equal for equal inputs, another one for each input that counts."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from streamflow import OffloadPlan
from streamflow.errors import ConfigurationError
from streamflow.host_weights import identity
from streamflow.host_weights.errors import UnstableConfigurationError
from streamflow.host_weights.identity import source_identity
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.plain_values import NotPlainError, plain
from streamflow.weights.adapters import DropAdapter, RenameAdapter, TensorAdapter
from streamflow.weights.topology import WeightTopology
from tests.streamflow.models import Mlp, Stack


def skeleton(hidden: int = 16, dtype: torch.dtype = torch.float32, num_blocks: int = 2) -> nn.Module:
    with torch.device("meta"):
        model = Stack(Mlp(hidden) for _ in range(num_blocks)).to(dtype)
    model.register_buffer("table", torch.arange(4), persistent=False)
    model.config = {"hidden": hidden, "_name_or_path": "somewhere"}
    return model


def identify(**changed: Any) -> str:
    given: dict[str, Any] = {
        "skeleton": skeleton(),
        "files": [("model.safetensors", "aa")],
        "topology": WeightTopology(),
        "plan": None,
        "adapters": (),
        "inputs": LoadInputs(),
        "producer": "test 1",
    }
    return source_identity(**{**given, **changed}).source_id


def with_table(values: torch.Tensor) -> nn.Module:
    model = skeleton()
    model.table = values
    return model


def with_config(config: Any) -> nn.Module:
    model = skeleton()
    model.config = config
    return model


CHANGES: dict[str, Callable[[], str]] = {
    "a file's bytes": lambda: identify(files=[("model.safetensors", "ab")]),
    "a file's name": lambda: identify(files=[("other.safetensors", "aa")]),
    "a shape": lambda: identify(skeleton=skeleton(hidden=32)),
    "a dtype": lambda: identify(skeleton=skeleton(dtype=torch.bfloat16)),
    "a block": lambda: identify(skeleton=skeleton(num_blocks=3)),
    "what the skeleton computed": lambda: identify(skeleton=with_table(torch.arange(4) + 1)),
    "the configuration": lambda: identify(skeleton=with_config({"hidden": 16, "eps": 1e-5})),
    "a declared configuration": lambda: identify(inputs=LoadInputs(model_config={"a": 1})),
    "the plan": lambda: identify(plan=OffloadPlan(stacks="blocks")),
    "a renaming": lambda: identify(adapters=[RenameAdapter({"a": "b"})]),
    "another renaming": lambda: identify(adapters=[RenameAdapter({"a": "c"})]),
    "what is dropped": lambda: identify(adapters=[DropAdapter(("a",))]),
    "a transform": lambda: identify(adapters=[TensorAdapter("a", ("b",), transform=lambda t: t[0])]),
    "another transform": lambda: identify(adapters=[TensorAdapter("a", ("c",), transform=lambda t: t[0])]),
    "the producer": lambda: identify(producer="test 2"),
    "the ABI string": lambda: identify(inputs=LoadInputs(producer_abi="mine 1")),
    "another ABI string": lambda: identify(inputs=LoadInputs(producer_abi="mine 2")),
    "load arguments": lambda: identify(inputs=LoadInputs(load_arguments={"variant": "fp16"})),
    "pipeline arguments": lambda: identify(inputs=LoadInputs(pipeline_arguments={"a": (1, 2)})),
    "the LoRA's scale": lambda: identify(inputs=LoadInputs(lora_scale=0.5)),
    "the LoRA's backend": lambda: identify(inputs=LoadInputs(lora_backend="peft")),
    "tensor-parallel rank 0": lambda: identify(topology=WeightTopology(tensor_parallel_size=2, tensor_parallel_rank=0)),
    "tensor-parallel rank 1": lambda: identify(topology=WeightTopology(tensor_parallel_size=2, tensor_parallel_rank=1)),
    "the sequence-parallel size": lambda: identify(topology=WeightTopology(sequence_parallel_size=2)),
    "the Ulysses degree": lambda: identify(topology=WeightTopology(ulysses_degree=2)),
    "the ring degree": lambda: identify(topology=WeightTopology(ring_degree=2)),
    "the all-gather degree": lambda: identify(topology=WeightTopology(allgather_degree=2)),
    "the sequence-parallel mode": lambda: identify(topology=WeightTopology(sequence_parallel_mode="ring")),
}


def test_equal_inputs_are_one_identity() -> None:
    assert identify() == identify()
    assert identify(skeleton=with_config({"hidden": 16, "_name_or_path": "elsewhere"})) == identify()
    by_chance = {"hidden": 16, "_use_default_values": ["b", "a"]}
    assert identify(skeleton=with_config(by_chance)) == identify()
    assert identify(skeleton=with_table(torch.rand(4)), replaced={"table"}) == identify(replaced={"table"})
    shuffled = [("b.safetensors", "bb"), ("a.safetensors", "aa")]
    assert identify(files=shuffled) == identify(files=shuffled[::-1])


def test_each_input_that_counts_makes_another_identity() -> None:
    found = {what: make() for what, make in CHANGES.items()}
    assert len({identify(), *found.values()}) == 1 + len(CHANGES), found


@pytest.mark.parametrize("library", ["torch", "streamflow", "diffusers"])
def test_another_version_of_a_library_is_another_identity(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identify()
    versions = dict(identity._versions())
    monkeypatch.setattr(identity, "_versions", lambda: [*{**versions, library: "0.0.1"}.items()])
    assert identify() != before


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Two folders with files of the same names, a link to one of them, and one that leads back up."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in ("a", "b"):
            (tmp_path / folder / name).write_text(f"{folder} {name}")
    (tmp_path / "one" / "linked").symlink_to(tmp_path / "two")
    (tmp_path / "two" / "up").symlink_to(tmp_path / "two")
    return tmp_path


def test_files_are_told_apart_by_what_they_are_to_loading(folders: Path) -> None:
    """The same files in other roles are other inputs."""
    one, two = folders / "one" / "a", folders / "two" / "a"
    inputs = [LoadInputs(lora_path=one, extra_files=(two,)), LoadInputs(lora_path=two, extra_files=(one,))]
    inputs += [LoadInputs(extra_files=(one, two)), LoadInputs(extra_files=(two, one))]
    found = [sorted((role, Path(path).read_text()) for role, path in declared.files()) for declared in inputs]
    assert all(found.count(each) == 1 for each in found)


def test_folders_are_read_through_links_and_by_the_names_in_them(folders: Path) -> None:
    found = LoadInputs(lora_path=folders / "one").files()
    assert [(role, Path(path).read_text()) for role, path in found] == [
        ("lora/a", "one a"),
        ("lora/b", "one b"),
        ("lora/linked/a", "two a"),
        ("lora/linked/b", "two b"),
    ]


def test_a_configuration_without_a_stable_form_is_refused_by_its_place() -> None:
    with pytest.raises(UnstableConfigurationError, match=r"config\.scheduler is a object.*model_config="):
        identify(skeleton=with_config({"scheduler": object()}))
    with pytest.raises(ConfigurationError, match=r"load_arguments\.hook"):
        LoadInputs(load_arguments={"hook": object()})


class Colour(enum.Enum):
    RED = "red"


@attrs.frozen
class Pair:
    left: int
    right: tuple[int, ...]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"b": (1, 2), 3: None}, {"b": [1, 2], "3": None}),
        ({3, 1, 2}, [1, 2, 3]),
        (Path("/a/b"), "/a/b"),
        (Colour.RED, "red"),
        (torch.bfloat16, "torch.bfloat16"),
        (Pair(1, (2,)), {"left": 1, "right": [2]}),
        (True, True),
    ],
)
def test_plain_values(value: Any, expected: Any) -> None:
    assert plain(value, "x") == expected


def test_what_has_no_stable_text_is_not_plain() -> None:
    with pytest.raises(NotPlainError) as caught:
        plain({"a": [1, lambda: 0]}, "x")
    assert caught.value.path == "x.a[1]"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("extra_files", "weights.bin"),
        ("extra_files", (1,)),
        ("lora_path", 3),
        ("lora_scale", "0.5"),
        ("lora_scale", True),
        ("producer_abi", ""),
        ("load_arguments", [1]),
        ("neighbours", (1,)),
    ],
)
def test_a_declaration_of_the_wrong_kind_is_refused_by_its_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=option):
        LoadInputs(**{option: value})
