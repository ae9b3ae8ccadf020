"""The state gates of an offload's components."""

from __future__ import annotations

from collections.abc import Sequence

from streamflow.binding.module_state import find_stateful
from streamflow.component_parts import BoundComponent
from streamflow.errors import ConfigurationError
from streamflow.pipelines.policy import Behaviour
from streamflow.runtime.state_gate import ComponentGate, Holding, StateGate


def gates_of(components: Sequence[BoundComponent], named: tuple[str, ...] | None) -> dict[str, ComponentGate]:
    """A gate for each component by its name.

    ``named``: paths of stateful modules, from the model, or in a pipeline from its component's name on; None: they are
    looked for.

    :raises ConfigurationError: if there is no module at a path.
    """
    if len(components) > 1:
        _check_components(components, named or ())
    lasting, is_one = Holding(), len(components) == 1
    return {component.name: _gate(component, named, lasting, is_one=is_one) for component in components}


def _gate(component: BoundComponent, named: tuple[str, ...] | None, lasting: Holding, *, is_one: bool) -> ComponentGate:
    lasts = component.given.behaviour is Behaviour.STREAMED
    own = named if is_one or named is None else _under(component.name, named)
    stateful = find_stateful(component.given.module, own)
    moved = frozenset(key for block in component.blocks for key, _ in block.identities())
    holding, watched = lasting if lasts else Holding(), named is None and not stateful
    return ComponentGate(StateGate(component.given.module, stateful, moved, holding, watched=watched), lasts=lasts)


def _under(name: str, paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(path.removeprefix(f"{name}.") if path != name else "" for path in paths if _is_under(name, path))


def _is_under(name: str, path: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _check_components(components: Sequence[BoundComponent], named: Sequence[str]) -> None:
    names = [component.name for component in components]
    lost = [path for path in named if not any(_is_under(name, path) for name in names)]
    if lost:
        known = ", ".join(names)
        raise ConfigurationError([f"stateful_modules: {path!r} is in no component ({known})" for path in lost])
