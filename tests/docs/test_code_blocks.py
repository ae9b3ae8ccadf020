"""What pages tell readers to do works: every block of code is run here, by another test, or says why it is not."""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from starlette.testclient import TestClient
from torch import nn
from torch.distributed import run as torchrun

import streamflow
from streamflow.tools.cli import main
from streamflow.tools.trace.report import CAUSE_NAMES
from tests.docs.blocks import DOCS, PAGES, ROOT, blocks_of
from tests.docs.conftest import ReaderFor

#: Pages that this module follows from top to bottom.
FOLLOWED = [
    "coming-from.md",
    "how-to/larger-than-memory.md",
    "how-to/serve.md",
    "how-to/several-gpus.md",
    "how-to/share-weights.md",
    "how-to/why-slow.md",
    "index.md",
    "ranks.md",
    "serving.md",
    "store.md",
    "tutorial.md",
]
#: Pages whose Python other modules run, as their ``DOCUMENT``.
RUN_ELSEWHERE = {
    "embedding.md": "tests.streamflow.embedding.test_document",
    "pipelines.md": "tests.streamflow.pipelines.test_document",
    "real-models.md": "tests.streamflow.real_models.test_document",
}


class Model(nn.Module):
    """Anything with blocks; takes what a pipeline takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        with torch.no_grad():
            return functools.reduce(lambda x, block: block(x), self.blocks, torch.ones(2, 16))


def test_every_page_with_code_is_run() -> None:
    with_code = [page for page in PAGES if any(block.language for block in blocks_of(page))]
    assert sorted([*FOLLOWED, *RUN_ELSEWHERE]) == with_code


@pytest.mark.parametrize("page", RUN_ELSEWHERE)
def test_the_module_that_runs_a_page_is_about_it(page: str) -> None:
    assert DOCS / page == importlib.import_module(RUN_ELSEWHERE[page]).DOCUMENT


def test_what_is_not_run_says_why_is_little_and_compiles() -> None:
    reasons = [block.reason for page in PAGES for block in blocks_of(page) if block.reason is not None]
    assert all(len(reason.split()) >= 5 for reason in reasons)
    assert len(reasons) <= 5
    for block in (block for page in PAGES for block in blocks_of(page)):
        if block.language == "python":
            compile(block.code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def test_every_block_is_seen_and_has_a_language_that_is_known() -> None:
    for page in PAGES:
        fences = re.findall(r"^```", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page)), page
        assert {block.language for block in blocks_of(page)} <= {"", "python", "sh"}, page


COMMANDS = [line for page in PAGES for block in blocks_of(page) if block.language == "sh" for line in block.lines]


@pytest.mark.parametrize("line", sorted({line for line in COMMANDS if line.startswith("streamflow ")}))
def test_a_command_and_its_options_are_there(line: str) -> None:
    command: click.Command = main
    words = line.split()[1:]
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None, line
        command = found
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_what_else_the_commands_name_is_there() -> None:
    for line in COMMANDS:
        program, *words = line.split()
        if program == "make":
            assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), line
        elif program == "python" and words[0].startswith("examples/"):
            assert (ROOT / words[0]).is_file(), line


# Pages


def test_the_tutorial(reader_for: ReaderFor, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reader = reader_for()
    reader.follow("tutorial.md")
    said = capsys.readouterr().out
    weights, peak = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:bytes of|on the)", said))
    assert 0 < peak < weights
    assert "source: checkpoint (" in said
    assert (tmp_path / "fox.png").stat().st_size > 0
    assert "transformer" in reader.printed[0]
    assert "compute" in reader.printed[1]


def test_serving_it(reader_for: ReaderFor, saved_pipeline: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(saved_pipeline, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    reader = reader_for(pipeline=None)
    reader.names["pipeline"] = pipeline
    reader.follow("how-to/serve.md")
    with TestClient(reader.names["app"]) as client:
        assert client.get("/ready").json() == {"state": "ready"}
        answer = client.post("/generate", json={"prompt": "a red fox"})
    assert answer.status_code == 200
    assert answer.content.startswith(b"\x89PNG")


def test_sharing_weights(reader_for: ReaderFor, saved_pipeline: Path) -> None:
    reader = reader_for(saved_pipeline)
    reader.follow("how-to/share-weights.md")
    assert reader.names["report"].outcome is streamflow.StoreOutcome.LOCAL_HIT
    assert len(reader.printed) == 4


def test_several_devices_share_one_entry(reader_for: ReaderFor, saved_pipeline: Path) -> None:
    reader = reader_for(saved_pipeline)
    reader.follow("how-to/several-gpus.md")

    async def outcome(offload: streamflow.Offload, model: nn.Module) -> str:
        report = offload.statistics().store
        assert report is not None
        return report.outcome

    outcomes = [asyncio.run(reader.names["serve"]("cpu", outcome)) for _ in range(2)]
    assert outcomes == ["published", "local_hit"]


def test_running_larger_than_memory(
    reader_for: ReaderFor, saved_pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader_for(saved_pipeline).follow("how-to/larger-than-memory.md")
    said = capsys.readouterr().out
    staged, budget = (int(re.findall(rf"{name}=(\d+)", said)[0]) for name in ("staged_peak_bytes", "budget_bytes"))
    assert 0 < staged <= budget


def test_finding_out_why_it_is_slow(reader_for: ReaderFor, saved_pipeline: Path, tmp_path: Path) -> None:
    reader = reader_for(saved_pipeline)
    reader.follow("how-to/why-slow.md")
    assert all((tmp_path / name).stat().st_size > 0 for name in ("trace.json", "trace.html", "trace.png"))
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"walk", "block", "copy"}


def test_the_table_of_causes_has_what_reports_say_and_nothing_else() -> None:
    text = (DOCS / "how-to" / "why-slow.md").read_text(encoding="utf-8")
    table = text.partition("| cause in the report |")[2].partition("\n\n")[0].splitlines()[2:]
    assert sorted(row.split(" | ")[0].removeprefix("| ") for row in table) == sorted(CAUSE_NAMES.values())


def test_the_first_page(reader_for: ReaderFor) -> None:
    reader = reader_for()
    reader.names |= {"streamflow": streamflow, "pipeline": Model()}
    reader.follow("index.md")
    assert isinstance(reader.names["image"], torch.Tensor)


def test_the_page_on_serving(reader_for: ReaderFor) -> None:
    model = Model()
    pipeline = type("Pipeline", (), {"transformer": model})
    reader = reader_for()
    reader.names |= {"streamflow": streamflow, "pipeline": pipeline, "make_image": model, "prompt": "a red fox"}
    reader.follow("serving.md")
    assert reader.names["request"].phase == "done"


def test_the_page_on_the_store(reader_for: ReaderFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "path" / "to" / "model"
    folder.mkdir(parents=True)
    save_file(Model().state_dict(), folder / "model.safetensors")
    reader = reader_for()
    reader.names |= {"build": Model, "directory": folder, "my_loader": lambda skeleton: skeleton}
    reader.follow("store.md")
    assert "StoreOutcome.PUBLISHED" in capsys.readouterr().out


def test_options_of_another_system_are_taken(reader_for: ReaderFor) -> None:
    reader = reader_for()
    reader.follow("coming-from.md")
    assert reader.names["config"].store_mode == "preferred"


def test_the_page_on_ranks_has_a_program_that_can_be_read_and_named(reader_for: ReaderFor, tmp_path: Path) -> None:
    reader_for().follow("ranks.md")
    spec = importlib.util.spec_from_file_location("pictures", tmp_path / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert asyncio.iscoroutinefunction(program.main)
    for line in re.findall(r"^torchrun .*", (DOCS / "ranks.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        arguments = torchrun.parse_args(shlex.split(line)[1:])
        assert (arguments.training_script, arguments.nproc_per_node) == ("pictures.py", "8")


def test_the_signatures_on_the_page_on_ranks_can_be_made() -> None:
    text = (DOCS / "ranks.md").read_text(encoding="utf-8")
    lines = re.findall(r"^wave = (streamflow\.WaveSignature\(.*\))", text, flags=re.MULTILINE)
    waves = [eval(line, {"streamflow": streamflow}) for line in lines]
    assert [wave.num_walks for wave in waves] == [30, 60, 80]
