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
from streamflow.hardware import Hardware
from streamflow.host_weights.components import SharedComponents, open_shared_components
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.ready import Ready, verified_meanwhile
from streamflow.opening import module_source, resident_blocks
from streamflow.pipelines.discovery import Component, find_components
from streamflow.pipelines.guards import PipelineGuards, check_pipeline
from streamflow.pipelines.inventories import take_inventories
from streamflow.pipelines.policy import Behaviour, Role, resolve_behaviours
from streamflow.runtime.offload import Offload
from streamflow.support import check_model


@asynccontextmanager
async def open_pipeline(
    pipeline: Any, config: OffloadConfig, reason: str, inputs: LoadInputs, hardware: Hardware
) -> AsyncIterator[Offload]:
    """An offload of a loaded pipeline whose components stream, or move, from their own tensors, for which ``reason`` is
    given; or, with the store on, from the entries of their content.

    :raises UnsupportedModelError: if somebody else places its components, or one is not on the host.
    :raises PlanError: if nothing of it would stream.
    :raises ComponentPolicyError: if ``config.components`` names what it cannot decide about.
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
            shared: SharedComponents | None = None
            if config.store_mode != "disabled":
                opened = open_shared_components(modules, inventories, config, inputs, hardware)
                shared = await stack.enter_async_context(opened)
            ready = {} if shared is None else shared.ready
            components = [
                _to_open(c, behaviours[c.name], inventories[c.name], config, reason, hardware, ready.get(c.name))
                for c in found
            ]
            report = None if shared is None else shared.report
            offload = await stack.enter_async_context(open_components(components, config, hardware, report, moves=True))
            if shared is not None:
                verified = verified_meanwhile(shared.store, shared.ready.values(), offload)
                await stack.enter_async_context(verified)
            stack.callback(guards.remove)
            guards.install()
            yield offload


def _to_open(
    component: Component,
    behaviour: Behaviour,
    inventory: Inventory,
    config: OffloadConfig,
    reason: str,
    hardware: Hardware,
    ready: Ready | None,
) -> ComponentToOpen:
    is_transformer = component.declared.role is Role.TRANSFORMER
    if ready is not None:  # where the weights lie now
        inventory = ready.inventory
    has_residents = behaviour is Behaviour.STREAMED and is_transformer
    return ComponentToOpen(
        name=component.name,
        module=component.module,
        behaviour=behaviour,
        inventory=inventory,
        make_source=module_source(component.name, config, reason, hardware) if ready is None else ready.make_source,
        residents=resident_blocks(inventory, config) if has_residents else (),
        store=None if ready is None else ready.report,
        gathers=is_transformer,  # one that encodes runs when its own rank's request needs it
    )
