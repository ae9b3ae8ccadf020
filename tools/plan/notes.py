"""What to know about a plan besides its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from streamflow.tools.plan.model_dir import LeftOut
from streamflow.tools.plan.sources import CHECKPOINT, MODULE
from streamflow.tools.plan.values import ComponentPlan
from streamflow.tools.terminal import format_bytes


def notes_of(
    components: Sequence[ComponentPlan],
    left_out: Sequence[LeftOut],
    *,
    stacks_declared: bool,
    host_available_bytes: int | None,
) -> tuple[str, ...]:
    """The notes, the most general ones first."""
    found = [
        "Sizes and stacks come from the names and headers in the files alone, in the dtypes stored there. "
        + ("" if stacks_declared else "A model may declare other stacks (name them with --stack). ")
        + "Buffers that it computes itself are not in the files; opening checks everything."
    ]
    if not stacks_declared and any(len(plan.stacks) > 1 for plan in components):
        found.append("Files do not tell the order in which stacks run; opening takes it from the model.")
    opened = grouped((plan.behaviour, plan.name) for plan in components if plan.behaviour is not None)
    if opened:
        told = "; ".join(f"{', '.join(names)} {behaviour}" for behaviour, names in opened.items())
        found.append(f"Opened as a whole pipeline, its components are: {told}.")
    notes = [(note, plan.name) for plan in components for note in _component_notes(plan, host_available_bytes)]
    found += [f"{', '.join(names)}: {note}" for note, names in grouped(notes).items()]
    return (*found, *(f"{left.name} ({left.kind}) is left out: {left.reason}." for left in left_out))


def grouped(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names for which each text was said, from pairs of a text and a name."""
    found: dict[str, list[str]] = {}
    for text, name in texts:
        found.setdefault(text, []).append(name)
    return found


def _component_notes(plan: ComponentPlan, host_available_bytes: int | None) -> Iterator[str]:
    if not plan.stacks:
        yield "its names show no list of blocks with enough of the weights, so it cannot stream."
        return
    if not plan.num_slots:
        yield "every block is resident, so nothing would stream."
    elif plan.num_slots == plan.num_blocks - len(plan.resident_blocks):
        yield "the window holds all streamed blocks, so each would be fetched once and stay."
    by_name = {source.name: source for source in plan.sources}
    if plan.source == CHECKPOINT and (by_name[CHECKPOINT].transfer, by_name[MODULE].transfer) == ("staged", "direct"):
        yield (
            "the checkpoint is not the fastest source here, because pageable memory has to be packed before it is "
            "copied; a loaded module's images would be page-locked and direct, for as much host memory."
        )
    chosen = plan.chosen
    if chosen is not None and chosen.registered_bytes:
        yield (
            "whether this machine can register its files is tried when it is opened; if not, blocks are packed before "
            "they are copied (`streamflow doctor` tells beforehand)."
        )
    if chosen is not None and host_available_bytes is not None and chosen.weight_host_bytes > host_available_bytes:
        yield (
            f"the {chosen.name} source needs {format_bytes(chosen.weight_host_bytes)} of host memory, and "
            f"{format_bytes(host_available_bytes)} are available here."
        )
