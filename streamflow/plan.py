"""What of a model is streamed: declared by the model or the caller, or discovered."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from streamflow.errors import PlanError


def _paths(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"an OffloadPlan takes attribute paths, one or several, not {value!r}")
    return tuple(value)


def _at_least_one(instance: OffloadPlan, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    if not value:
        raise PlanError("an OffloadPlan needs at least one stack: without one nothing would be streamed")


def _non_empty_names(instance: OffloadPlan, attribute: attrs.Attribute[tuple[str, ...]], value: object) -> None:
    for path in value:  # type: ignore[attr-defined]
        if not isinstance(path, str) or not path:
            raise TypeError(f"{attribute.name} must hold non-empty attribute paths, not {path!r}")


@attrs.frozen(kw_only=True)
class OffloadPlan:
    """Which parts of a model are streamed and how. Paths are dotted attribute paths from the model.

    A model class may declare its plan as a class attribute ``streamflow_plan``.

    Attributes:
        stacks: the block lists, in execution order (e.g. Flux: double, then single blocks).
        resident_eligible: stacks whose blocks may stay on the device; None: all of them.
        on_demand: components that are moved to the device only while they run (used for whole pipelines).
        encoder_stacks: block lists of the pipeline's encoders, by path from the pipeline.

    :raises TypeError: if a path is not a non-empty string.
    :raises PlanError: if there is no stack.
    """

    stacks: tuple[str, ...] = attrs.field(converter=_paths, validator=[_non_empty_names, _at_least_one])
    resident_eligible: tuple[str, ...] | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(_paths),
        validator=attrs.validators.optional(_non_empty_names),
    )
    on_demand: tuple[str, ...] = attrs.field(default=(), converter=_paths, validator=_non_empty_names)
    encoder_stacks: tuple[str, ...] = attrs.field(default=(), converter=_paths, validator=_non_empty_names)
