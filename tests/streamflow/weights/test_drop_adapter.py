"""Tensors of a checkpoint that loading leaves out: only those that are named, and never one that is needed."""

from __future__ import annotations

import pytest

from streamflow.weights.adapters import CheckpointAdapter, DropAdapter, RenameAdapter, TensorAdapter
from streamflow.weights.checkpoint_plan import CheckpointFallback, CheckpointPlan, SourceAssignment
from streamflow.weights.preflight import preflight
from tests.streamflow.weights.test_preflight import entries, incompatible, need, plan_of


@pytest.mark.parametrize(
    ("names", "name", "dropped"),
    [
        (("a.b",), "a.b", True),
        (("a.b",), "a.bc", False),
        (("a.b",), "axb", False),
        (("*.position_ids",), "text.embeddings.position_ids", True),
        (("*.position_ids",), "position_ids", False),
        (("blocks.?.norm", "x"), "blocks.3.norm", True),
        (("blocks.?.norm", "x"), "x", True),
        ((), "x", False),
    ],
)
def test_whole_names_and_wildcards(names: tuple[str, ...], name: str, dropped: bool) -> None:
    assert DropAdapter(names).drops(name) == dropped


def test_one_text_is_not_a_list_of_names() -> None:
    with pytest.raises(ValueError, match=r"a tuple of names, not one text: \('position_ids',\)"):
        DropAdapter("position_ids")


def test_a_tensor_that_is_left_over_names_the_adapter_that_would_drop_it() -> None:
    incompatible(preflight([need("a")], entries("a", "ids")), "match nothing in the module: 'ids'", "a DropAdapter")


def test_a_dropped_tensor_is_not_left_over() -> None:
    found = plan_of(preflight([need("a")], entries("a", "ids", "old.ids"), [DropAdapter(("ids", "*.ids"))]))
    assert dict(found.assignments) == {"a": SourceAssignment(("a",))}
    assert not found.has_adapters


def test_names_are_those_of_the_file_before_any_renaming() -> None:
    rename = RenameAdapter(prefixes={"old.": ""})
    drop = DropAdapter(("old.ids",))
    orders: list[list[CheckpointAdapter]] = [[rename, drop], [drop, rename]]
    for adapters in orders:
        plan_of(preflight([need("a")], entries("old.a", "old.ids"), adapters))
    incompatible(preflight([need("a")], entries("old.a", "old.ids"), [rename, DropAdapter(("ids",))]), "'old.ids'")


def test_a_needed_tensor_that_is_dropped_is_missing() -> None:
    incompatible(preflight([need("a")], entries("a"), [DropAdapter(("*",))]), "parameter 'a' is not in the checkpoint")
    adapter = TensorAdapter("a", ("x",), transform=lambda tensors: tensors[0])
    lacks = preflight([need("a")], entries("x"), [adapter, DropAdapter(("x",))])
    incompatible(lacks, "from tensors that the checkpoint lacks: 'x'")


@pytest.mark.parametrize("dropped", [("a",), ("b",)])
def test_a_second_source_can_be_dropped_instead_of_compared(dropped: tuple[str, ...]) -> None:
    tied = need("a", aliases=("b",))
    assert isinstance(preflight([tied], entries("a", "b")), CheckpointFallback)
    found = preflight([tied], entries("a", "b"), [DropAdapter(dropped)])
    assert isinstance(found, CheckpointPlan)
    assert found.assignments["a"].sources != dropped
