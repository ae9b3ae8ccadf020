"""Finding the blocks of a model: by the plan it declares, by attribute names in use, else by looking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import torch
from torch import nn

from streamflow.errors import PlanError
from streamflow.plan import OffloadPlan

#: Attribute of a model class that holds its `OffloadPlan`.
PLAN_ATTRIBUTE = "streamflow_plan"
#: Attributes by which model classes elsewhere name their block lists; each holds a path or a sequence of paths.
DECLARED_NAMES = ("_layerwise_offload_blocks_attrs", "_layerwise_offload_blocks_attr")
#: Attribute by which model classes elsewhere name the classes of modules that belong on one device.
WHOLE_CLASSES_ATTRIBUTE = "_no_split_modules"
#: A block list found by looking counts if it holds at least this share of the model's bytes.
MIN_SHARE = 0.05
#: Lists of whole classes are all the stacks if they hold at least this share together; some classes name few blocks.
ENOUGH_SHARE = 0.8


@attrs.frozen(eq=False)
class Block:
    """One block: its canonical dotted path in the model, and whether it may be resident."""

    path: str
    module: nn.Module
    stack: str
    resident_eligible: bool


def find_blocks(model: nn.Module, plan: OffloadPlan | None = None) -> tuple[Block, ...]:
    """The blocks of ``model`` in expected execution order; a module that comes twice is one block.

    ``plan`` None: the model's own plan, else its declared attribute names, else its outermost module lists: those of
    modules that its class says are not to be split, and, where these hold less than four fifths of its bytes, also
    those that hold a twentieth.

    :raises PlanError: if a path does not lead to a list of modules, if lists are nested in each other, or if nothing
        is found; it lists the block lists of the model.
    """
    plan = plan or declared_plan(model) or _discovered_plan(model)
    paths = {id(module): path for path, module in model.named_modules()}
    blocks: dict[int, Block] = {}
    for stack in plan.stacks:
        eligible = plan.resident_eligible is None or stack in plan.resident_eligible
        for index, module in enumerate(_stack_modules(model, stack)):
            path = paths.get(id(module))
            if path is None:
                raise PlanError(f"{stack}[{index}] is not a part of the model", block_list_paths(model))
            blocks.setdefault(id(module), Block(path, module, stack, eligible))
    _check_eligible(model, plan)
    _check_not_nested(blocks.values())
    _check_callable(blocks.values(), model)
    return tuple(blocks.values())


def declared_plan(model: nn.Module) -> OffloadPlan | None:
    """The plan that the model's class declares; None if it declares none.

    :raises PlanError: if the declaration is not a plan.
    """
    plan = getattr(model, PLAN_ATTRIBUTE, None)
    if plan is not None:
        if not isinstance(plan, OffloadPlan):
            raise PlanError(f"{type(model).__name__}.{PLAN_ATTRIBUTE} must be an OffloadPlan, not {plan!r}")
        return plan
    for name in DECLARED_NAMES:
        if (declared := getattr(model, name, None)) is not None:
            return OffloadPlan(stacks=declared)
    return None


def block_list_paths(model: nn.Module) -> list[str]:
    """The paths of all outermost, non-empty module lists."""
    return [path for path, _ in _outermost_lists(model)]


def _discovered_plan(model: nn.Module) -> OffloadPlan:
    lists = [(path, module) for path, module in _outermost_lists(model) if _could_be_a_stack(module)]
    chosen = _of_whole_classes(model, lists)
    if _share(model, [blocks for path, blocks in lists if path in chosen]) < ENOUGH_SHARE:
        large = _large(model, lists)
        chosen = tuple(path for path, _ in lists if path in chosen or path in large)
    if not chosen:
        raise PlanError(
            f"no block list was found in {type(model).__name__}: declare one with OffloadPlan(stacks=(...)); a stack "
            "is an nn.ModuleList (or sequence of modules) whose members run one after the other",
            block_list_paths(model),
        )
    return OffloadPlan(stacks=chosen)


def _of_whole_classes(model: nn.Module, lists: Iterable[tuple[str, nn.ModuleList]]) -> tuple[str, ...]:
    """The lists of such modules as the model's class says are not to be split over devices."""
    classes = getattr(model, WHOLE_CLASSES_ATTRIBUTE, None) or ()
    return tuple(path for path, blocks in lists if all(type(block).__name__ in classes for block in blocks))


def _large(model: nn.Module, lists: Iterable[tuple[str, nn.ModuleList]]) -> tuple[str, ...]:
    return tuple(path for path, blocks in lists if _share(model, [blocks]) >= MIN_SHARE)


def _share(model: nn.Module, parts: Iterable[nn.Module]) -> float:
    """Of the model's bytes of parameters, what is in ``parts``; of nothing it is nothing."""
    return _parameter_bytes(parts) / max(_parameter_bytes([model]), 1)


def _outermost_lists(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and len(child):
            yield path, child
        else:
            yield from _outermost_lists(child, f"{path}.")


def _could_be_a_stack(blocks: nn.ModuleList) -> bool:
    """Whether all its members are modules (None may be among them), and not all of them lists of modules."""
    members = list(blocks)
    return all(isinstance(block, nn.Module) for block in members) and not all(
        isinstance(block, nn.ModuleList) for block in members
    )


def _parameter_bytes(modules: Iterable[nn.Module]) -> int:
    unique = {id(p): p for module in modules for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in unique.values())


def _stack_modules(model: nn.Module, stack: str) -> list[nn.Module]:
    found: object = model
    for part in stack.split("."):
        try:
            found = found[int(part)] if part.isdigit() else getattr(found, part)  # type: ignore[index]
        except (AttributeError, IndexError, KeyError, TypeError):
            raise PlanError(
                f"{type(model).__name__} has no block list at {stack!r} ({part!r} is not there)",
                block_list_paths(model),
            ) from None
    modules = list(found) if isinstance(found, Iterable) and not isinstance(found, torch.Tensor) else []
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise PlanError(f"{stack!r} is no list of modules but {type(found).__name__}", block_list_paths(model))
    return modules


def _check_eligible(model: nn.Module, plan: OffloadPlan) -> None:
    unknown = set(plan.resident_eligible or ()) - set(plan.stacks)
    if unknown:
        raise PlanError(
            f"resident_eligible names {sorted(unknown)}, which are no stacks of the plan {list(plan.stacks)}",
            block_list_paths(model),
        )


def _check_not_nested(blocks: Iterable[Block]) -> None:
    by_id = {id(block.module): block for block in blocks}
    for block in by_id.values():
        for inner in block.module.modules():
            other = by_id.get(id(inner))
            if other is not None and other is not block:
                raise PlanError(f"the block {other.path} lies inside the block {block.path}; name only one of the two")


def _check_callable(blocks: Iterable[Block], model: nn.Module) -> None:
    for block in blocks:
        if getattr(block.module.forward, "__func__", None) is nn.Module.forward:
            kind = type(block.module).__name__
            raise PlanError(
                f"{block.path} is no block: a {kind} has no forward, so nobody would call it; name the lists inside it",
                block_list_paths(model),
            )
