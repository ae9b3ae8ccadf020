"""The page on pipelines: its code works, and its table has every family that is run and no other."""

from __future__ import annotations

import asyncio
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from diffusers import FluxPipeline, UNet2DConditionModel

import streamflow
from streamflow.discovery import find_blocks
from streamflow.pipelines.discovery import find_components
from tests.streamflow.kit import in_worker, sha256_of
from tests.streamflow.pipelines.document import DOCUMENT, ROOT, documented_rows
from tests.streamflow.pipelines.families.all import FAMILIES
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.families.wan import WAN
from tests.streamflow.pipelines.kit import Ready, open_ready, ready

TEXT = DOCUMENT.read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "text_to_image.py"

#: The published configuration, as far as sizes depend on it.
SDXL_UNET: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "transformer_layers_per_block": (1, 2, 10),
    "projection_class_embeddings_input_dim": 2816,
    "cross_attention_dim": 2048,
}


def definitions() -> dict[str, Any]:
    """What the page's code defines, one block after the other."""
    namespace: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE):
        exec(compile(code, DOCUMENT.name, "exec", dont_inherit=True), namespace)
    return namespace


def test_the_table_has_every_family_that_is_run_and_no_other() -> None:
    named = [tuple(row.strip("| ").split(" | ")[:2]) for row in documented_rows()]
    assert named == [(family.name, f"`{family.pipeline_class.__name__}`") for family in FAMILIES]


def test_a_pipeline_generates_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ready(FLUX)
    given.pipeline.default_sample_size = 4  # the page asks for no size, and this one's models are small
    resident = in_worker(lambda: torch.manual_seed(3) and given.pipeline("a fox", num_inference_steps=30))
    monkeypatch.setattr(FluxPipeline, "from_pretrained", lambda repository, dtype: given.pipeline)
    torch.manual_seed(3)
    image = asyncio.run(definitions()["generate"]("FLUX.1-dev", "a fox"))
    assert image.tobytes() == resident.images[0].tobytes()


def test_the_pages_plan_fits_the_pipeline_that_it_is_for() -> None:
    plan = definitions()["plan"]
    assert isinstance(plan, streamflow.OffloadPlan)
    found = {component.name: component.declared.behaviour for component in find_components(FLUX.build(), plan)}
    assert found == {
        "text_encoder": "staged",
        "text_encoder_2": "streamed",
        "transformer": "streamed",
        "vae": "staged",
    }


async def window_bytes(given: Ready, plan: streamflow.OffloadPlan | None) -> int:
    """What the window takes by ``plan``, with which the pipeline is exact."""
    async with open_ready(given, {"plan": plan}) as offload:
        await given.check(offload)
        return offload.statistics().engine.window_bytes


def test_the_pages_plan_for_a_unet_is_exact_in_a_smaller_window() -> None:
    (family,) = (family for family in FAMILIES if "unet" in family.streamed)
    given = ready(family)
    plan = definitions()["unet_plan"](given.pipeline)
    assert asyncio.run(window_bytes(given, plan)) < asyncio.run(window_bytes(given, None)) / 2


def test_how_large_the_largest_blocks_of_a_unet_are() -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel(**SDXL_UNET)
    plan = definitions()["unet_plan"](SimpleNamespace(unet=unet))
    own = streamflow.OffloadPlan(stacks=[path.removeprefix("unet.") for path in plan.stacks])
    counts = [unet.num_parameters(), num_parameters_of_largest(unet, None), num_parameters_of_largest(unet, own)]
    said = re.search(
        r"XL's ([\d.]+) billion parameters the largest has ([\d.]+),.*?the largest has ([\d.]+):", TEXT, re.DOTALL
    )
    assert said is not None
    assert [f"{count / 1e9:.2f}" for count in counts] == list(said.groups())


def num_parameters_of_largest(model: torch.nn.Module, plan: streamflow.OffloadPlan | None) -> int:
    """Of the blocks that the plan finds."""
    return max(sum(p.numel() for p in block.module.parameters()) for block in find_blocks(model, plan))


def test_another_pipeline_over_the_same_components_generates_the_same() -> None:
    given = ready(FLUX)
    other = definitions()["another"](given.pipeline)
    other.set_progress_bar_config(disable=True)
    assert other.transformer is given.pipeline.transformer
    assert other.scheduler is not given.pipeline.scheduler
    assert other.tokenizer_2 is not given.pipeline.tokenizer_2
    assert sha256_of(in_worker(lambda: FLUX.generate(other))) == given.images[0]


def test_another_pipeline_has_the_options_of_the_first() -> None:
    """Without its boundary, a pipeline of two experts would use one of them."""
    given = WAN.build()
    other = definitions()["another"](given)
    assert other.config.boundary_ratio == given.config.boundary_ratio is not None


# The example


def run_here(*arguments: str) -> Result:
    """The example's command, run in this process."""
    return CliRunner().invoke(runpy.run_path(str(EXAMPLE))["main"], arguments)


@pytest.mark.slow
def test_the_example_makes_a_picture_and_leaves_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--device", "cpu", "--steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal to the resident pipeline: True\n")
    found = re.search(r"weights: ([\d,]+) bytes, on the device at most ([\d,]+)\n", done.stdout)
    assert found
    weights, peak = (int(number.replace(",", "")) for number in found.groups())
    assert 0 < peak < weights
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_the_example_runs_within_a_budget_and_refuses_one_that_is_too_small(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--steps", "1", "--size", "32", "--out", str(tmp_path / "made.png"))
    done = run_here(*options, "--budget", "2500000")
    assert done.exit_code == 0, done.output
    assert "equal to the resident pipeline: True" in done.output
    assert (tmp_path / "made.png").stat().st_size > 0
    done = run_here(*options, "--budget", "1000")
    assert done.exit_code != 0
    assert "device_budget_bytes=1,000" in str(done.exception)
