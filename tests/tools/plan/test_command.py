"""``streamflow plan``: its two forms, what it costs, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch import nn

from streamflow.tools.cli import main
from streamflow.tools.plan import command

SaveModel = Callable[..., Path]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def plan_of(*arguments: object) -> dict[str, Any]:
    result = run("--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    assert isinstance(plan, dict)
    return plan


@pytest.fixture
def single(tmp_path: Path, tiny_model: nn.Module, save_single: SaveModel) -> Path:
    return save_single(tiny_model, tmp_path / "single")


def test_every_option_arrives(single: Path) -> None:
    plan = plan_of(
        single,
        *("--window", 3, "--resident-blocks", 2, "--resident-bytes", 50_000, "--resident-placement", "leading"),
        *(
            "--device",
            "cuda",
            "--transfer",
            "staged",
            "--no-pin-host-memory",
            "--host-registration-limit-bytes",
            9,
            "--packing-threads",
            5,
        ),
        *("--staging-chunk-bytes", 4096, "--tensor-parallel-size", 2, "--hsdp", "--online-quantization", "fp8"),
        *("--stack", "blocks"),
    )
    expected = {
        "window_blocks": 3,
        "resident_blocks": 2,
        "resident_bytes": 50_000,
        "resident_placement": "leading",
        "device": "cuda",
        "transfer": "staged",
        "pin_host_memory": False,
        "host_registration_limit_bytes": 9,
        "packing_threads": 5,
        "staging_chunk_bytes": 4096,
        "stacks": ["blocks"],
    }
    assert expected.items() <= plan["options"].items()
    topology = {"tensor_parallel_size": 2, "hsdp": True, "online_quantization": "fp8"}
    assert topology.items() <= plan["options"]["topology"].items()
    assert plan["device"] == "cuda"
    (component,) = plan["components"]
    assert component["num_slots"] == 3
    assert component["resident_blocks"] == [0, 1]
    assert component["source"] == "module"


def test_a_pipeline_has_a_plan_for_each_component(pipeline: Path) -> None:
    plan = plan_of(pipeline, "--device", "cpu", "--resident-blocks", "all")
    assert plan["is_pipeline"] is True
    assert plan["inferred_from"] == "tensor names"
    blocks = {c["name"]: sum(stack["num_blocks"] for stack in c["stacks"]) for c in plan["components"]}
    assert blocks == {"transformer": 8, "text_encoder": 8, "head": 0}
    assert [left["name"] for left in plan["left_out"]] == ["checker", "absent"]
    notes = "\n".join(plan["notes"])
    assert "transformer, text_encoder: every block is resident, so nothing would stream." in notes
    assert "head: its names show no list of blocks" in notes
    assert "checker (Checker) is left out: its weights are not in safetensors files" in notes


def test_what_components_do_in_an_open_pipeline_is_told(pipeline: Path) -> None:
    plan = plan_of(pipeline, "--device", "cpu")
    behaviours = {component["name"]: component["behaviour"] for component in plan["components"]}
    assert behaviours == {"transformer": "streamed", "text_encoder": "staged", "head": "staged"}
    assert any("transformer streamed; text_encoder, head staged" in note for note in plan["notes"])
    alone = plan_of(pipeline / "transformer", "--device", "cpu")
    assert alone["components"][0]["behaviour"] is None


def test_components_come_in_the_order_that_their_pipeline_declares(pipeline: Path) -> None:
    index = json.loads((pipeline / "model_index.json").read_text(encoding="utf-8"))
    renamed = json.dumps({**index, "_class_name": "FluxPipeline"})
    (pipeline / "model_index.json").write_text(renamed, encoding="utf-8")
    plan = plan_of(pipeline, "--device", "cpu")
    assert [component["name"] for component in plan["components"]] == ["text_encoder", "transformer", "head"]


def test_people_get_the_same_figures(pipeline: Path) -> None:
    result = run(pipeline, "--device", "cuda", "--window", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    (transformer, *_) = plan_of(pipeline, "--device", "cuda", "--window", "3")["components"]
    for words in (
        f"Plan for the pipeline {pipeline}",
        "window_blocks 3",
        "transformer (TinyModel)",
        "text_encoder (TinyEncoder)",
        f"3 x {transformer['slot_bytes'] / 1000:.1f} kB = {transformer['window_bytes'] / 1000:.1f} kB",
        f"{transformer['device_bytes'] / 1000:.1f} kB",
        "chosen",
        "the mapped files are page-locked",
        "whether this machine can register its files is tried when it is opened",
        "names and headers in the files alone",
    ):
        assert words in " ".join(result.stdout.split()), words


def test_files_that_are_not_registered_are_said_to_be_slower_than_a_loaded_module(pipeline: Path) -> None:
    result = run(pipeline, "--device", "cuda", "--host-registration-limit-bytes", "0")
    text = " ".join(result.stdout.split())
    assert "the checkpoint source is pageable memory (host_registration_limit_bytes=0)" in text
    assert "the checkpoint is not the fastest source here" in text
    assert "`streamflow doctor`" not in text


def test_a_model_of_any_size_costs_nothing(tmp_path: Path) -> None:
    """A file of 400 GB, all of it hole: nothing but the header is read, nothing is allocated."""
    block_bytes, num_blocks = 5 * 10**9, 80
    shape = {"dtype": "U8", "shape": [block_bytes]}
    tensors = {
        f"blocks.{i}.w": {**shape, "data_offsets": [i * block_bytes, (i + 1) * block_bytes]} for i in range(num_blocks)
    }
    header = json.dumps(tensors).encode()
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_blocks * block_bytes)
    (component,) = plan_of(path, "--device", "cuda")["components"]
    assert component["weight_bytes"] == 400 * 10**9
    assert component["window_bytes"] == 2 * (block_bytes + -block_bytes % 256)
    assert component["streamed_bytes"] == num_blocks * (block_bytes + -block_bytes % 256)


def test_host_memory_that_is_not_there_is_said(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "available_host_bytes", lambda: 1000)
    plan = plan_of(single, "--device", "cpu", "--hsdp")
    assert plan["host_available_bytes"] == 1000
    assert any("of host memory, and 1.0 kB are available here" in note for note in plan["notes"])


def test_a_window_that_holds_everything_is_said(single: Path) -> None:
    notes = plan_of(single, "--window", "6", "--resident-blocks", "2")["notes"]
    assert any("the window holds all streamed blocks" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--window", "0", "--packing-threads", "0"], "- window_blocks is 0 but must be at least 1\n- packing_threads"),
        (["--resident-placement", "middle"], "resident_placement must be one of 'spread', 'leading', not 'middle'"),
        (["--transfer", "teleport"], "transfer must be one of 'auto', 'direct', 'staged', not 'teleport'"),
        (["--resident-blocks", "9"], "resident_blocks is 9 but single has 8 blocks"),
        (["--resident-blocks", "few"], "'few' is neither a number of blocks nor 'all'"),
        (["--resident-bytes", "-1"], "resident_bytes is -1 but must be at least 0"),
        (["--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["--stack", "layers"], "has no block list at 'layers'; block lists in this model: blocks"),
        (["--windows", "2"], "No such option"),
    ],
)
def test_a_wrong_option_is_one_clear_message(single: Path, arguments: list[str], words: str) -> None:
    result = run(single, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_stacks_cannot_be_declared_for_a_pipeline(pipeline: Path) -> None:
    result = run(pipeline, "--stack", "blocks")
    assert result.exit_code == 2
    assert "--stack is for one component; give the folder of one of transformer, text_encoder, head" in result.stderr


def test_a_model_without_blocks_is_an_error(tmp_path: Path, save_single: SaveModel) -> None:
    model = nn.Module()
    model.head, model.few = nn.Linear(100, 100), nn.ModuleList([nn.Linear(2, 2)])
    result = run(save_single(model, tmp_path / "head"))
    assert result.exit_code == 2
    assert "name its block lists with --stack; block lists in this model: few" in result.stderr
    assert plan_of(tmp_path / "head", "--stack", "few")["components"][0]["stacks"][0]["num_blocks"] == 1


@pytest.mark.slow
def test_the_program_itself(tmp_path: Path, single: Path) -> None:
    content = (single / "model.safetensors").read_bytes()
    (single / "model.safetensors").write_bytes(content[:100])
    program = [sys.executable, "-m", "streamflow", "plan", "single"]
    broken = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (broken.returncode, broken.stdout) == (2, "")
    assert broken.stderr.startswith("streamflow: single/model.safetensors: the file ends inside its header")
    assert broken.stderr.count("\n") == 1
