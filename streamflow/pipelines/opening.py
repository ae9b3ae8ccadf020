"""Opening a whole pipeline: its components under one budget, through one window."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from streamflow.assembly import open_components
from streamflow.binding.guards import all_claimed
from streamflow.binding.inventory import Inventory
from streamflow.component_parts import ComponentToOpen
from streamflow.config import OffloadConfig
from streamflow.errors import ConfigurationError
from streamflow.opening import backend_of, module_source, resident_blocks
from streamflow.pipelines.discovery import Component, find_components
from streamflow.pipelines.guards import PipelineGuards, check_pipeline
from streamflow.pipelines.inventories import take_inventories
from streamflow.pipelines.policy import Behaviour, Role, resolve_behaviours
from streamflow.runtime.offload import Offload
from streamflow.stages.devices.base import Device
from streamflow.support import check_model


@asynccontextmanager
async def open_pipeline(
    pipeline: Any, config: OffloadConfig, reason: str, device: Device | None
) -> AsyncIterator[Offload]:
    """An offload of a loaded pipeline whose components stream, or move, from their own tensors; ``reason`` says why.

    :raises UnsupportedModelError: if somebody else places its components, or one is not on the host.
    :raises PlanError: if nothing of it would stream.
    :raises ComponentPolicyError: if ``config.components`` names what it cannot decide about.
    """
    if config.store_mode != "disabled":
        raise ConfigurationError([f"store_mode={config.store_mode!r} is for single models; open the transformer alone"])
    check_pipeline(pipeline)
    found = find_components(pipeline, config.plan)
    behaviours = resolve_behaviours([component.declared for component in found], config.components)
    for component in found:
        check_model(component.module)
    modules = {component.name: component.module for component in found}
    with all_claimed(modules):
        inventories = take_inventories(found, behaviours)
        components = [_to_open(c, behaviours[c.name], inventories[c.name], config, reason) for c in found]
        guards = PipelineGuards(pipeline, list(modules.values()))
        async with open_components(components, config, backend_of(device, config), moves=True) as offload:
            try:
                guards.install()
                yield offload
            finally:
                guards.remove()


def _to_open(
    component: Component, behaviour: Behaviour, inventory: Inventory, config: OffloadConfig, reason: str
) -> ComponentToOpen:
    has_residents = behaviour is Behaviour.STREAMED and component.declared.role is Role.TRANSFORMER
    residents = resident_blocks(inventory, config) if has_residents else ()
    return ComponentToOpen(
        component.name, component.module, behaviour, inventory, module_source(config, reason), residents
    )
