"""Opening a whole pipeline: its components under one budget, through one window."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from streamflow.assembly import open_components
from streamflow.binding.guards import all_claimed
from streamflow.binding.inventory import Inventory
from streamflow.component_parts import ComponentToOpen
from streamflow.config import OffloadConfig
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.opening import backend_of, resident_blocks
from streamflow.pipelines.discovery import Component, find_components
from streamflow.pipelines.guards import PipelineGuards, check_pipeline
from streamflow.pipelines.inventories import take_inventories
from streamflow.pipelines.policy import Behaviour, Role, resolve_behaviours
from streamflow.pipelines.sharing import PipelineSources, open_sources
from streamflow.runtime.offload import Offload
from streamflow.stages.devices.base import Device
from streamflow.support import check_model


@asynccontextmanager
async def open_pipeline(
    pipeline: Any, config: OffloadConfig, inputs: LoadInputs, reason: str, device: Device | None
) -> AsyncIterator[Offload]:
    """An offload of a loaded pipeline whose components stream, or move, from their own tensors, for which ``reason`` is
    given, or from entries of the host weight store.

    :raises UnsupportedModelError: if somebody else places its components, or one is not on the host.
    :raises PlanError: if nothing of it would stream.
    :raises ComponentPolicyError: if ``config.components`` names what it cannot decide about.
    :raises StoreError: if the store must be used and cannot.
    """
    check_pipeline(pipeline)
    found = find_components(pipeline, config.plan)
    behaviours = resolve_behaviours([component.declared for component in found], config.components)
    for component in found:
        check_model(component.module)
    modules = {component.name: component.module for component in found}
    with all_claimed(modules):
        inventories = take_inventories(found, behaviours)
        guards = PipelineGuards(pipeline, list(modules.values()))
        async with AsyncExitStack() as stack:
            sources = await stack.enter_async_context(open_sources(found, inventories, config, inputs, reason))
            components = [_to_open(c, behaviours[c.name], inventories[c.name], config, sources) for c in found]
            streamed = next(name for name, behaviour in behaviours.items() if behaviour is Behaviour.STREAMED)
            opened = open_components(
                components, config, backend_of(device, config), sources.report_on(streamed), moves=True
            )
            offload = await stack.enter_async_context(opened)
            await stack.enter_async_context(sources.verified_meanwhile(offload))
            stack.callback(guards.remove)
            guards.install()
            yield offload


def _to_open(
    component: Component, behaviour: Behaviour, inventory: Inventory, config: OffloadConfig, sources: PipelineSources
) -> ComponentToOpen:
    has_residents = behaviour is Behaviour.STREAMED and component.declared.role is Role.TRANSFORMER
    residents = resident_blocks(inventory, config) if has_residents else ()
    return ComponentToOpen(
        component.name, component.module, behaviour, inventory, sources.make_sources[component.name], residents
    )
