"""What the requests of one wave have in common: which components they walk over, how often, in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from streamflow.stages.errors import StreamflowError


class WaveSignatureError(StreamflowError, ValueError):
    """A wave's signature says something that cannot be walked. ``field`` is the part at fault."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field, self.value = field, value
        super().__init__(f"the wave's {field} is {value!r}, but {problem}")


def _as_steps(value: object) -> tuple[tuple[str, int], ...]:
    problem = "has to be pairs of a component's name and a number of steps, as (('transformer', 30),)"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise WaveSignatureError("steps", value, problem)
    pairs = tuple(value)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise WaveSignatureError("steps", value, problem)
    return tuple((component, number) for component, number in pairs)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@attrs.frozen
class WaveSignature:
    """Two requests can walk together exactly if their signatures are equal.

    ``steps``: pairs of a component's name and its number of steps, in the order in which they are done; a component may
    come more than once. ``passes_per_step``: forward calls for each step (2: guidance by a second call).
    ``pattern``: which blocks a pass runs, under a name that callers choose ("": all of them).

    :raises WaveSignatureError: if there are no steps, a name is no text, or a number is none of 1 or more.
    """

    steps: tuple[tuple[str, int], ...] = attrs.field(converter=_as_steps)
    passes_per_step: int = 1
    pattern: str = ""

    def __attrs_post_init__(self) -> None:
        if not self.steps:
            raise WaveSignatureError("steps", self.steps, "a wave has at least one step")
        for component, number in self.steps:
            if not isinstance(component, str) or not component:
                raise WaveSignatureError("steps", self.steps, f"{component!r} is no component's name")
            if not _is_count(number):
                raise WaveSignatureError("steps", self.steps, f"{component!r} needs 1 step or more")
        if not _is_count(self.passes_per_step):
            raise WaveSignatureError("passes_per_step", self.passes_per_step, "has to be 1 or more")
        if not isinstance(self.pattern, str):
            raise WaveSignatureError("pattern", self.pattern, "has to be a name")

    @property
    def num_walks(self) -> int:
        """How many walks a wave of this signature has."""
        return self.passes_per_step * sum(number for _, number in self.steps)

    def walks(self) -> tuple[str, ...]:
        """The component of every walk, in order."""
        return tuple(component for component, number in self.steps for _ in range(number * self.passes_per_step))

    def differences(self, other: WaveSignature) -> str:
        """The fields in which ``other`` differs, each with this one's value and its; "" where there are none."""
        mine, theirs = self.to_wire(), other.to_wire()
        return "; ".join(
            f"{name} {mine[name]!r} against {theirs[name]!r}" for name in mine if mine[name] != theirs[name]
        )

    def of_pass(self, component: str) -> WaveSignature:
        """The wave that a pass over ``component`` belongs to: this one, whichever it is."""
        return self

    def to_wire(self) -> dict[str, Any]:
        """Plain values for JSON, of which `from_wire` makes an equal signature."""
        steps = [[component, number] for component, number in self.steps]
        return {"steps": steps, "passes_per_step": self.passes_per_step, "pattern": self.pattern}

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> WaveSignature:
        """The signature that `to_wire` was called of.

        :raises WaveSignatureError: if fields are missing or unknown, or say what cannot be walked.
        """
        expected = [field.name for field in attrs.fields(cls)]
        if sorted(values) != sorted(expected):
            raise WaveSignatureError("fields", sorted(values), f"they have to be {expected}")
        return cls(**values)


class EachPass:
    """Stands for the signature of a request of which nobody knows what it does: each of its passes is a wave."""

    def walks(self) -> tuple[str, ...]:
        """Nothing is known ahead."""
        return ()

    def of_pass(self, component: str) -> WaveSignature:
        """The wave that a pass over ``component`` belongs to: one of a single walk."""
        return WaveSignature(((component, 1),))


#: What a request may say of the waves that it needs.
WaveNeed = WaveSignature | EachPass
