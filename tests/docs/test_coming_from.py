"""The page for users of other systems has each of their options, and no option that they do not have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import accelerate
import attrs
import diffusers
import pytest
from diffusers.hooks import apply_group_offloading

import streamflow
from streamflow.dlo_options import DEFAULTS
from tests.docs.blocks import DOCS

TEXT = (DOCS / "coming-from.md").read_text(encoding="utf-8")


def rows_of(system: str) -> list[list[str]]:
    table = TEXT.partition(f"<!-- options of: {system} -->\n")[2].partition("<!-- end -->")[0]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:]]


def options_of(system: str) -> list[str]:
    return [name for row in rows_of(system) for name in re.findall(r"`(\w+)`", row[0])]


def parameters_of(*functions: Callable[..., Any]) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters} - {"self"}


def test_the_options_of_distributed_layerwise_offload() -> None:
    assert options_of("dlo") == list(DEFAULTS)


def test_the_options_of_group_offloading() -> None:
    functions = (
        apply_group_offloading,
        diffusers.ModelMixin.enable_group_offload,
        diffusers.DiffusionPipeline.enable_group_offload,
    )
    assert sorted(options_of("group")) == sorted(parameters_of(*functions))


def test_the_options_of_accelerate() -> None:
    functions = (
        accelerate.cpu_offload,
        accelerate.cpu_offload_with_hook,
        accelerate.disk_offload,
        accelerate.dispatch_model,
        accelerate.load_checkpoint_and_dispatch,
        accelerate.infer_auto_device_map,
    )
    assert sorted(options_of("accelerate")) == sorted(parameters_of(*functions))


@pytest.mark.parametrize("system", ["dlo", "group", "accelerate"])
def test_what_is_named_as_the_equivalent_is_there(system: str) -> None:
    own = {field.name for field in attrs.fields(streamflow.OffloadConfig)}
    store = {f"store.{field.name}" for field in attrs.fields(streamflow.StoreOptions)}
    store |= {f"ranks.{field.name}" for field in attrs.fields(streamflow.RankOptions)}
    functions = {"open_offload", "open_streamed", "build", "checkpoint_dir", "streamflow plan"}
    for row in rows_of(system):
        for named in re.findall(r"`([^`]+)`", row[1]):
            assert re.split(r"[=(]", named)[0] in own | store | functions | {"diffusers_builder"}, named
