"""Which blocks the names of a checkpoint's tensors suggest: what discovery would find in the model itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from streamflow.discovery import MIN_SHARE
from streamflow.errors import PlanError
from streamflow.tools.plan.model_dir import Component
from streamflow.weights.summary import StackSummary, summarize_checkpoint


def stacks_of(component: Component, declared: Sequence[str] = ()) -> tuple[StackSummary, ...]:
    """The stacks at the ``declared`` paths, in that order; without any, the lists that hold enough of the weights.

    Lists that are found by their names come in the order of the files, which need not be that of execution.

    :raises PlanError: if there is no list at a declared path, or the same is declared twice.
    """
    found = {stack.path: stack for stack in summarize_checkpoint(component.entries).stacks}
    if not declared:
        least = MIN_SHARE * component.weight_bytes
        return tuple(stack for stack in found.values() if stack.nbytes >= least > 0)
    missing = [path for path in declared if path not in found]
    if missing:
        raise PlanError(f"{component.path} has no block list at {', '.join(map(repr, missing))}", list(found))
    if len(set(declared)) != len(declared):
        raise PlanError(f"a stack is named twice: {', '.join(declared)}")
    return tuple(found[path] for path in declared)


def list_paths(component: Component) -> list[str]:
    """The paths of all lists that the names show, however small."""
    return [stack.path for stack in summarize_checkpoint(component.entries).stacks]


def is_in_block(name: str, stacks: Iterable[StackSummary]) -> bool:
    """Whether the tensor of this name is part of a block of one of the stacks."""
    return any(_index_under(stack.path, name) < stack.num_blocks for stack in stacks)


def _index_under(path: str, name: str) -> float:
    """``i``, if the name is ``path.<i>.`` and more; infinity if it is not."""
    prefix = f"{path}." if path else ""
    index, dot, _ = name.removeprefix(prefix).partition(".")
    is_index = name.startswith(prefix) and dot and index.isascii() and index.isdecimal() and str(int(index)) == index
    return int(index) if is_index else math.inf
