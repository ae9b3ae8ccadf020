"""Finding the components of a pipeline, and what it declares of them.

Nothing here imports a pipeline library: a pipeline is any object whose ``components`` are a mapping with modules in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from streamflow.discovery import PLAN_ATTRIBUTE, find_blocks
from streamflow.errors import PlanError
from streamflow.pipelines.policy import Behaviour, DeclaredComponent, Role
from streamflow.pipelines.roles import role_of
from streamflow.plan import OffloadPlan

#: Attributes by which pipelines say in what order their components run, and which must not be moved.
SEQUENCE_ATTRIBUTE = "model_cpu_offload_seq"
EXCLUDED_ATTRIBUTE = "_exclude_from_cpu_offload"


@attrs.frozen(eq=False)
class Component:
    """A component: its name, its module, what is declared of it, and the plan by which its blocks are found.

    ``plan`` is None for one that does not stream, and for one whose blocks are to be discovered.
    """

    name: str
    module: nn.Module
    declared: DeclaredComponent
    plan: OffloadPlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.module.parameters())


def is_pipeline(model: object) -> bool:
    """Whether ``model`` is no module itself, and has some among its ``components``."""
    components = getattr(model, "components", None)
    if isinstance(model, nn.Module) or not isinstance(components, Mapping):
        return False
    return any(isinstance(part, nn.Module) for part in components.values())


def find_components(pipeline: Any, plan: OffloadPlan | None = None) -> tuple[Component, ...]:
    """The components that hold weights, in the order in which they run. A module under two names is found once.

    ``plan`` None: the pipeline's own (its class's ``streamflow_plan``), else what it declares for offloading:
    transformers stream, what it excludes is resident, everything else is staged while it is used.

    :raises PlanError: if the plan names what is not there, or nothing would stream.
    """
    plan = plan if plan is not None else getattr(pipeline, PLAN_ATTRIBUTE, None)
    modules = _modules_in_order(pipeline)
    found = _planned(modules, plan) if plan is not None else _declared(modules, pipeline)
    if not any(component.declared.behaviour is Behaviour.STREAMED for component in found):
        raise PlanError(
            f"nothing of {type(pipeline).__name__} would stream: none of its components is a transformer with blocks; "
            "name the block lists in OffloadPlan(stacks=('component.blocks', ...))",
            list(modules),
        )
    return found


def _modules_in_order(pipeline: Any) -> dict[str, nn.Module]:
    """Each module once, under the first name that it has: those of the declared sequence first."""
    named = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    sequence = str(getattr(pipeline, SEQUENCE_ATTRIBUTE, None) or "").split("->")
    ordered = [*(name for name in sequence if name in named), *(name for name in named if name not in sequence)]
    by_module: dict[int, str] = {}
    for name in ordered:
        by_module.setdefault(id(named[name]), name)
    return {name: named[name] for name in by_module.values()}


def _role(name: str, module: nn.Module) -> Role:
    libraries = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
    return role_of(name, type(module).__name__, "transformers" if "transformers" in libraries else "")


def _declared(modules: Mapping[str, nn.Module], pipeline: Any) -> tuple[Component, ...]:
    excluded = getattr(pipeline, EXCLUDED_ATTRIBUTE, ())
    return tuple(_declared_component(name, module, name in excluded) for name, module in modules.items())


def _declared_component(name: str, module: nn.Module, excluded: bool) -> Component:
    role = _role(name, module)
    if excluded:
        return Component(name, module, DeclaredComponent(name, role, Behaviour.RESIDENT))
    if role is Role.TRANSFORMER and _has_blocks(module):
        return Component(name, module, DeclaredComponent(name, role, Behaviour.STREAMED))
    role = Role.PART if role is Role.TRANSFORMER else role
    return Component(name, module, DeclaredComponent(name, role, Behaviour.STAGED))


def _has_blocks(module: nn.Module) -> bool:
    try:
        find_blocks(module)
    except PlanError:
        return False
    return True


def _planned(modules: Mapping[str, nn.Module], plan: OffloadPlan) -> tuple[Component, ...]:
    """By a plan whose paths begin with the names of components."""
    _check_names(modules, plan)
    return tuple(_planned_component(name, module, plan) for name, module in modules.items())


def _planned_component(name: str, module: nn.Module, plan: OffloadPlan) -> Component:
    stacks, encoder_stacks = _under(name, plan.stacks), _under(name, plan.encoder_stacks)
    role = _role(name, module)
    if stacks or encoder_stacks:
        role = Role.TRANSFORMER if stacks else role
        eligible = None if plan.resident_eligible is None else _under(name, plan.resident_eligible)
        own = OffloadPlan(stacks=(*stacks, *encoder_stacks), resident_eligible=eligible)
        return Component(name, module, DeclaredComponent(name, role, Behaviour.STREAMED), own)
    role = Role.PART if role is Role.TRANSFORMER else role
    behaviour = Behaviour.STAGED if name in plan.on_demand else Behaviour.RESIDENT
    return Component(name, module, DeclaredComponent(name, role, behaviour))


def _under(name: str, paths: Sequence[str]) -> tuple[str, ...]:
    """The paths that begin with the component ``name``, from there on."""
    return tuple(path.removeprefix(f"{name}.") for path in paths if path.startswith(f"{name}."))


def _check_names(modules: Mapping[str, nn.Module], plan: OffloadPlan) -> None:
    paths = (*plan.stacks, *plan.encoder_stacks, *(plan.resident_eligible or ()), *plan.on_demand)
    for path in paths:
        name, _, rest = path.partition(".")
        if name not in modules:
            raise PlanError(f"the plan names {path!r}, but there is no component {name!r}", list(modules))
        if not rest and path not in plan.on_demand:
            raise PlanError(f"the plan names {path!r}, which is a component and no block list in one", list(modules))
