"""The examples run as they stand, stream, and compare."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from streamflow.weights.errors import CheckpointNotFoundError
from tests.streamflow.real_models.kit import ROOT
from tests.streamflow.real_models.models import FLUX_MODEL, Variant

Saved = Callable[[Variant], Path]
FLUX_EXAMPLE = ROOT / "examples" / "stream_flux_transformer.py"


def run_here(*arguments: str) -> Result:
    """The example's command, run in this process."""
    command = runpy.run_path(str(FLUX_EXAMPLE))["main"]
    return CliRunner().invoke(command, arguments)


def numbers(said: str, pattern: str) -> list[int]:
    found = re.search(pattern, said)
    assert found, f"{pattern!r} is not in {said!r}"
    return [int(number.replace(",", "")) for number in found.groups()]


@pytest.mark.slow
def test_without_a_directory_a_small_transformer_streams(tmp_path: Path) -> None:
    """As a program of its own, which warns of nothing and leaves nothing behind."""
    command = [sys.executable, "-W", "error", str(FLUX_EXAMPLE), "--device", "cpu", "--steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "source: checkpoint (" in done.stdout
    assert done.stdout.endswith("equal to the resident model: True\n")
    weights, peak = numbers(done.stdout, r"weights: ([\d,]+) bytes, on the device at most ([\d,]+)\n")
    streamed, walks = numbers(done.stdout, r"streamed: ([\d,]+) bytes in (\d+) walks\n")
    assert 0 < peak < weights / 2
    assert streamed > weights
    assert walks == 2
    assert list(tmp_path.iterdir()) == []


def test_a_directory_streams_in_the_dtype_that_is_asked_for(saved: Saved) -> None:
    directory = saved(Variant(FLUX_MODEL, torch.bfloat16, sharded=True))
    options = ("--device", "cpu", "--window", "3", "--steps", "1")
    done = run_here(str(directory), "--dtype", "float32", *options)
    assert done.exit_code == 0, done.output
    assert "source: module (checkpoint_plan_incompatible: " in done.output
    assert "equal to the resident model: True\n" in done.output
    done = run_here(str(directory), "--no-compare", *options)
    assert done.exit_code == 0, done.output
    assert "source: checkpoint (" in done.output
    assert "equal" not in done.output


def test_what_is_no_directory_of_a_model_ends_with_the_reason(tmp_path: Path) -> None:
    done = run_here(str(tmp_path), "--device", "cpu")
    assert done.exit_code != 0
    assert isinstance(done.exception, CheckpointNotFoundError)
