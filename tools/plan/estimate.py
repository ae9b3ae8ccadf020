"""What of a component would stream under a configuration: the decisions of opening, made from its files' headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from streamflow.config import ALL, OffloadConfig
from streamflow.errors import ConfigurationError
from streamflow.residency import choose_residents
from streamflow.stages.layout import align_up
from streamflow.tools.plan.declared import DeclaredPipeline
from streamflow.tools.plan.model_dir import Component
from streamflow.tools.plan.names import is_in_block, stacks_of
from streamflow.tools.plan.sources import ComponentSizes, choose_planned, plan_sources
from streamflow.tools.plan.values import ComponentPlan, StackPlan
from streamflow.weights.summary import StackSummary


def plan_component(
    component: Component,
    config: OffloadConfig,
    *,
    device_is_host: bool,
    stacks: Sequence[str] = (),
    declared: DeclaredPipeline | None = None,
) -> ComponentPlan:
    """The plan of ``component``; ``config.device`` counts for nothing, ``device_is_host`` does.

    ``stacks`` are declared paths; empty: what the names suggest. ``declared``: what the component's pipeline declares;
    None: it is no pipeline's.

    :raises PlanError: if a declared path leads to no list.
    :raises ConfigurationError: if more residents are asked for than there are blocks.
    """
    found = stacks_of(component, stacks)
    images = [nbytes for stack in found for nbytes in stack.block_image_bytes]
    residents = _choose_residents(component, images, config)
    streamed = [nbytes for block, nbytes in enumerate(images) if block not in residents]
    num_slots, slot_bytes = min(config.window_blocks, len(streamed)), max(streamed, default=0)
    resident_bytes = sum(images[block] for block in residents)
    sources = plan_sources(_sizes(component, found, images), config, device_is_host) if images else ()
    name, reason = choose_planned(sources, config, device_is_host)
    chosen = next((source for source in sources if source.name == name), None)
    return ComponentPlan(
        name=component.name,
        kind=component.kind,
        behaviour=None if declared is None else declared.behaviour_of(component.name, component.kind, bool(found)),
        path=component.path,
        num_files=component.num_files,
        num_tensors=len(component.entries),
        dtype_bytes=_dtype_bytes(component),
        weight_bytes=component.weight_bytes,
        stacks=tuple(_stack_plans(found, residents)),
        block_bytes=sum(images),
        resident_blocks=residents,
        resident_bytes=resident_bytes,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        window_bytes=num_slots * slot_bytes,
        streamed_bytes=sum(streamed),
        source=name,
        source_reason=reason,
        sources=sources,
        device_bytes=num_slots * slot_bytes + resident_bytes + (0 if chosen is None else chosen.fixed_bytes),
    )


def _choose_residents(component: Component, images: Sequence[int], config: OffloadConfig) -> tuple[int, ...]:
    asked = config.resident_blocks
    count = len(images) if isinstance(asked, str) else asked
    if images and count is not None and count > len(images):
        raise ConfigurationError(
            [f"resident_blocks is {count} but {component.name} has {len(images)} blocks; use {ALL!r} for all of them"]
        )
    return choose_residents(
        images,
        [True] * len(images),
        count=count,
        budget_bytes=config.resident_bytes,
        spread=config.resident_placement == "spread",
    )


def _sizes(component: Component, stacks: Sequence[StackSummary], images: Sequence[int]) -> ComponentSizes:
    outside = [entry.nbytes for name, entry in component.entries.items() if not is_in_block(name, stacks)]
    return ComponentSizes(
        image_bytes=tuple(images),
        block_weight_bytes=component.weight_bytes - sum(outside),
        fixed_weight_bytes=sum(outside),
        fixed_image_bytes=sum(align_up(nbytes) for nbytes in outside),
    )


def _stack_plans(stacks: Sequence[StackSummary], residents: Sequence[int]) -> Iterator[StackPlan]:
    first = 0
    for stack in stacks:
        sizes = stack.block_image_bytes
        yield StackPlan(
            path=stack.path,
            num_blocks=len(sizes),
            num_resident_blocks=sum(first <= block < first + len(sizes) for block in residents),
            min_block_bytes=min(sizes),
            max_block_bytes=max(sizes),
            total_bytes=sum(sizes),
        )
        first += len(sizes)


def _dtype_bytes(component: Component) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for entry in component.entries.values():
        counted[entry.dtype] += entry.nbytes
    return dict(counted.most_common())
