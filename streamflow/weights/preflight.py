"""Decide whether a checkpoint can be the source of a module's weights. Pure: reads no tensor, changes nothing.

The answer is a plan only where it is proven that loading the module the ordinary way would give the same bytes: each
parameter and persistent buffer has exactly one source of its own shape and dtype, and no tensor of the checkpoint is
left over, but for those that a DropAdapter names. Anything else is a fallback with a code and the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from streamflow.ranks.matrix import Axis, Parallelism, Way, refusals
from streamflow.weights.adapters import CheckpointAdapter, DropAdapter, RenameAdapter, TransformAdapter
from streamflow.weights.checkpoint_plan import CheckpointFallback, CheckpointPlan, FallbackCode, Needed
from streamflow.weights.safetensors_header import TensorEntry
from streamflow.weights.source_matching import SameBytes, SourceMatcher, some
from streamflow.weights.topology import WeightTopology

#: What each axis is called that rules a checkpoint out.
_CODES = {
    Axis.TENSOR_PARALLEL: FallbackCode.UNSUPPORTED_TP,
    Axis.HSDP: FallbackCode.UNSUPPORTED_HSDP,
    Axis.ONLINE_QUANTIZATION: FallbackCode.UNSUPPORTED_ONLINE_QUANTIZATION,
}


def preflight(
    needed: Sequence[Needed],
    entries: Mapping[str, TensorEntry],
    adapters: Iterable[CheckpointAdapter] = (),
    topology: WeightTopology | None = None,
    *,
    same_bytes: SameBytes | None = None,
) -> CheckpointPlan | CheckpointFallback:
    """A plan that covers all of ``needed`` and all of ``entries``, or why there is none.

    ``entries`` are the checkpoint's tensors by name. Tied weights need one name in the file; where the file has several
    of a tensor's names, ``same_bytes`` must prove that they agree (None, or no proof: a fallback). ``topology`` None
    means one rank and no conversion.

    :raises ValueError: if ``needed`` names a tensor twice.
    :raises TypeError: if one of ``adapters`` is not a checkpoint adapter.
    """
    topology = topology if topology is not None else WeightTopology()
    adapters = tuple(adapters)
    _check_adapters(adapters)
    _check_distinct(needed)
    unsupported = _unsupported(topology)
    if unsupported is not None:
        return unsupported
    matcher = SourceMatcher(entries, adapters, same_bytes)
    assignments = {name: found for tensor in needed if (found := matcher.assign(tensor)) for name in tensor.names}
    problems = (*matcher.problems, *matcher.leftovers())
    if problems:
        return CheckpointFallback(FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE, some(problems, "; "), problems)
    return CheckpointPlan(MappingProxyType(assignments))


def _check_adapters(adapters: Iterable[object]) -> None:
    for adapter in adapters:
        if not isinstance(adapter, (RenameAdapter, DropAdapter, TransformAdapter)):
            raise TypeError(f"a RenameAdapter, a DropAdapter or a TransformAdapter is expected, not {adapter!r}")


def _check_distinct(needed: Iterable[Needed]) -> None:
    seen: set[str] = set()
    for name in (name for tensor in needed for name in tensor.names):
        if name in seen:
            raise ValueError(f"the module's tensor {name!r} is listed twice; list tied names once, as aliases")
        seen.add(name)


def _unsupported(topology: WeightTopology) -> CheckpointFallback | None:
    for row, reason in refusals(Parallelism.of(topology), Way.CHECKPOINT):
        return CheckpointFallback(_CODES[row.axis], reason, (reason,))
    return None
