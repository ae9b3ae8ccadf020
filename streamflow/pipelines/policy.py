"""What each component of a pipeline does while the offload is open. Pure: no torch, no clock.

A pipeline declares what may be done with its components. The ``components`` option takes some of it back: ``False``
keeps a component on the device whole, out of the staged lifecycle; ``True`` permits what was declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import attrs

from streamflow.errors import ComponentPolicyError, ComponentPolicyTypeError

#: The key of a policy that speaks of every component that it does not name.
DEFAULT = "default"


class Role(StrEnum):
    """What a component is for. ``part`` is anything that is none of the others."""

    TRANSFORMER = "transformer"
    ENCODER = "encoder"
    VAE = "vae"
    PART = "part"


class Behaviour(StrEnum):
    """``streamed``: block by block through the window. ``staged``: whole, while it is used. ``resident``: always."""

    STREAMED = "streamed"
    STAGED = "staged"
    RESIDENT = "resident"


@attrs.frozen
class DeclaredComponent:
    """A component that was found, and what is declared of it."""

    name: str
    role: Role
    behaviour: Behaviour


def checked_policy(policy: object) -> dict[str, bool] | None:
    """``policy`` as a mapping of component names to booleans; None stays None.

    :raises ComponentPolicyTypeError: if it is no mapping, a key is no name, or a value is no boolean.
    """
    if policy is None:
        return None
    if not isinstance(policy, Mapping):
        raise ComponentPolicyTypeError(f"components must map names to booleans (or be None), not be {policy!r}")
    for key, value in policy.items():
        if not isinstance(key, str) or not key:
            raise ComponentPolicyTypeError(f"a key of components must be a component's name, not {key!r}")
        if not isinstance(value, bool):
            raise ComponentPolicyTypeError(f"components[{key!r}] must be True or False, not {value!r}")
    return dict(policy)


def resolve_behaviours(
    declared: Sequence[DeclaredComponent], policy: Mapping[str, bool] | None
) -> dict[str, Behaviour]:
    """What each component does, by name, in the order in which they are declared.

    None and an empty policy keep what is declared. An exact name comes before ``default``, which says nothing about
    transformers: a policy is about encoders, VAEs and other parts.

    :raises ComponentPolicyError: if a name is unknown or a transformer's, or if nothing streams that a policy could
        make room for.
    """
    if policy:
        _check_names(declared, policy)
    return {component.name: _behaviour(component, policy or {}) for component in declared}


def _behaviour(component: DeclaredComponent, policy: Mapping[str, bool]) -> Behaviour:
    permitted = component.role is Role.TRANSFORMER or policy.get(component.name, policy.get(DEFAULT, True))
    return component.behaviour if permitted else Behaviour.RESIDENT


def _check_names(declared: Sequence[DeclaredComponent], policy: Mapping[str, bool]) -> None:
    known = [component.name for component in declared if component.role is not Role.TRANSFORMER]
    transformers = [component.name for component in declared if component.role is Role.TRANSFORMER]
    if not any(component.behaviour is Behaviour.STREAMED for component in declared):
        raise ComponentPolicyError("components says what makes room for streamed blocks, but nothing streams", known)
    if not known:
        raise ComponentPolicyError("components is about a pipeline's encoders and VAEs, and there are none", known)
    for name in policy:
        if name in transformers:
            raise ComponentPolicyError(f"{name!r} is a transformer, which always streams", known)
        if name not in known and name != DEFAULT:
            raise ComponentPolicyError(f"there is no encoder or VAE {name!r}", known)
