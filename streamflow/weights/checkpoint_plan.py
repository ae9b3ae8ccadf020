"""What preflight is asked and what it answers. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import attrs

from streamflow.weights.adapters import TransformAdapter


@attrs.frozen
class Needed:
    """One tensor of the module that a source must provide.

    ``aliases`` are the other names that the same tensor has in the module (tied weights). ``overlaps`` are names of
    tensors that share some, but not all, of its memory. ``stride`` is in elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: Literal["parameter", "buffer"] = "parameter"
    aliases: tuple[str, ...] = ()
    overlaps: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@attrs.frozen
class SourceAssignment:
    """Where one tensor of the module comes from.

    ``sources`` are names of the checkpoint: one tensor as it is, or what ``adapter`` makes of them.
    """

    sources: tuple[str, ...]
    adapter: TransformAdapter | None = None


class FallbackCode(StrEnum):
    """Why a checkpoint cannot be the source."""

    UNSUPPORTED_TP = "unsupported_tp"
    UNSUPPORTED_HSDP = "unsupported_hsdp"
    UNSUPPORTED_ONLINE_QUANTIZATION = "unsupported_online_quantization"
    CHECKPOINT_PLAN_INCOMPATIBLE = "checkpoint_plan_incompatible"


@attrs.frozen
class CheckpointPlan:
    """A proven source for every needed tensor, by each of its names (aliases have the same assignment)."""

    assignments: Mapping[str, SourceAssignment]

    @property
    def has_adapters(self) -> bool:
        """Whether any tensor needs a transform; then the whole source stays staged."""
        return any(assignment.adapter is not None for assignment in self.assignments.values())


@attrs.frozen
class CheckpointFallback:
    """The checkpoint cannot be the source: a code for programs, a reason for people, and every single problem."""

    code: FallbackCode
    reason: str
    problems: tuple[str, ...]
