"""The file layer and the code that decides import no torch: programs that only look at files need none."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import streamflow.weights

WITHOUT_TORCH = {
    "checkpoint",
    "checkpoint_choice",
    "checkpoint_file",
    "checkpoint_index",
    "errors",
    "file_mapping",
    "file_reading",
    "name_patterns",
    "safetensors_dtypes",
    "safetensors_header",
    "strict_json",
    "strides",
    "summary",
    "topology",
}
ALLOWED = (
    {"attrs", "streamflow.errors", "streamflow.stages.errors", "streamflow.stages.layout", "streamflow.stages.dtypes"}
    | {f"streamflow.weights.{name}" for name in WITHOUT_TORCH}
    | sys.stdlib_module_names
)


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_a_module_of_the_file_layer_imports_no_torch(name: str) -> None:
    tree = ast.parse((Path(streamflow.weights.__path__[0]) / f"{name}.py").read_text())
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in found if module not in ALLOWED and module.split(".")[0] not in ALLOWED} == set()
