"""Blocks by the names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamflow.errors import PlanError
from streamflow.tools.plan.model_dir import Component
from streamflow.tools.plan.names import is_in_block, list_paths, stacks_of
from streamflow.weights.summary import summarize_checkpoint

MakeComponent = Callable[[Mapping[str, int]], Component]

SIZES = {"single.0.w": 40, "single.1.w": 50, "double.0.w": 30, "tiny.0.w": 1, "head": 3}


def test_lists_with_enough_of_the_weights_are_stacks(component: MakeComponent) -> None:
    assert [stack.path for stack in stacks_of(component(SIZES))] == ["single", "double"]
    assert list_paths(component(SIZES)) == ["single", "double", "tiny"]


def test_declared_stacks_come_in_their_own_order(component: MakeComponent) -> None:
    found = stacks_of(component(SIZES), ("tiny", "single"))
    assert [(stack.path, stack.block_bytes) for stack in found] == [("tiny", (1,)), ("single", (40, 50))]


def test_the_least_share_is_that_of_discovery(component: MakeComponent) -> None:
    assert [stack.path for stack in stacks_of(component({"a.0.w": 5, "rest": 95}))] == ["a"]
    assert stacks_of(component({"a.0.w": 5, "rest": 96})) == ()
    assert stacks_of(component({"a.0.w": 0})) == ()


def test_a_declared_stack_that_is_not_there_lists_what_is(component: MakeComponent) -> None:
    with pytest.raises(PlanError, match=r"no block list at 'blocks'; block lists in this model: single, double, tiny"):
        stacks_of(component(SIZES), ("single", "blocks"))
    with pytest.raises(PlanError, match="a stack is named twice: single, single"):
        stacks_of(component(SIZES), ("single", "single"))


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("single.0.w", True),
        ("single.1.a.0.b", True),
        ("single.2.w", False),
        ("single.w", False),
        ("single.01.w", False),
    ],
)
def test_a_tensor_of_a_block_is_told_from_others(component: MakeComponent, name: str, inside: bool) -> None:
    assert is_in_block(name, stacks_of(component(SIZES))) is inside


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.from_regex(r"\A([a-c]|[0-3])(\.([a-c]|[0-3])){0,4}\Z"), st.integers(0, 1000)))
def test_what_is_outside_the_blocks_is_what_the_summary_leaves(component: MakeComponent, sizes: dict[str, int]) -> None:
    made = component(sizes)
    summary = summarize_checkpoint(made.entries)
    outside = sum(size for name, size in sizes.items() if not is_in_block(name, summary.stacks))
    assert outside == summary.root_bytes
