"""Opening one model: from the model and a source of its weights to an offload."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from torch import nn

from streamflow.assembly import open_components
from streamflow.binding.blocks import BoundBlock
from streamflow.binding.guards import claimed
from streamflow.binding.inventory import Inventory, take_inventory
from streamflow.component_parts import ComponentToOpen, MakeSource
from streamflow.config import ALL, OffloadConfig
from streamflow.discovery import find_blocks
from streamflow.errors import ComponentPolicyError, ConfigurationError
from streamflow.hardware import Hardware
from streamflow.pipelines.policy import Behaviour
from streamflow.ranks.shared_source import SharedModuleSource
from streamflow.residency import choose_residents
from streamflow.runtime.offload import Offload
from streamflow.stages.devices.base import Device
from streamflow.store.reports import StoreReport
from streamflow.support import check_model, check_not_compiled_whole
from streamflow.transfer_choice import why_not_page_locked
from streamflow.weights.source import ModuleSource, WeightSource


@asynccontextmanager
async def open_module(
    model: nn.Module, config: OffloadConfig, reason: str, hardware: Hardware, report: StoreReport | None = None
) -> AsyncIterator[Offload]:
    """An offload of a loaded model that streams from the model's own tensors, for which ``reason`` is given.

    :raises UnsupportedModelError: if the model is none, or is not on the host.
    """
    check_model(model)
    with claimed(model, type(model).__name__):
        inventory = inventory_of(model, config)
        make_source = module_source(type(model).__name__, config, reason, hardware)
        async with open_with_source(model, inventory, config, make_source, hardware, report) as offload:
            yield offload


@asynccontextmanager
async def open_with_source(
    model: nn.Module,
    inventory: Inventory,
    config: OffloadConfig,
    make_source: MakeSource,
    hardware: Hardware,
    report: StoreReport | None = None,
) -> AsyncIterator[Offload]:
    """An offload of a claimed model that streams from any source; ``report`` is what the store did for it."""
    if config.components:
        raise ComponentPolicyError("components is about a pipeline's encoders and VAEs, and this is one model", ())
    name, residents = type(model).__name__, resident_blocks(inventory, config)
    component = ComponentToOpen(name, model, Behaviour.STREAMED, inventory, make_source, residents, report)
    async with open_components([component], config, hardware, report) as offload:
        yield offload


def module_source(name: str, config: OffloadConfig, reason: str, hardware: Hardware) -> MakeSource:
    """Makes the source that is the component ``name`` itself; ranks that gather keep one host copy of it together."""

    def make_source(inventory: Inventory, blocks: tuple[BoundBlock, ...], backend: Device) -> WeightSource:
        pins = why_not_page_locked(config, device_is_host=backend.is_host) is None
        num_pin_threads = config.effective_packing_threads if pins else None
        if hardware.ranks is None:
            return ModuleSource(inventory, blocks, reason, num_pin_threads)
        agreement = hardware.ranks.coordinator
        return SharedModuleSource(name, inventory, blocks, reason, agreement, config, num_pin_threads=num_pin_threads)

    return make_source


def inventory_of(model: nn.Module, config: OffloadConfig) -> Inventory:
    """The inventory of a model that is claimed; nothing is changed.

    :raises PlanError: if no blocks are found.
    :raises UnsupportedModelError: if the model cannot be streamed exactly.
    """
    blocks = find_blocks(model, config.plan)
    check_not_compiled_whole(model, [block.module for block in blocks])
    return take_inventory(model, blocks)


def effective_config(config: OffloadConfig | Mapping[str, Any] | None) -> OffloadConfig:
    """``config`` as an `OffloadConfig`.

    :raises ConfigurationError: if options are not usable.
    """
    if isinstance(config, OffloadConfig):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigurationError([f"config must be an OffloadConfig, a mapping of options or None, not {config!r}"])
    return OffloadConfig.from_mapping(config or {})


def resident_blocks(inventory: Inventory, config: OffloadConfig) -> tuple[int, ...]:
    """The blocks that are to be resident, by their index.

    :raises ConfigurationError: if more are asked for than may be.
    """
    eligible = [tensors.block.resident_eligible for tensors in inventory.blocks]
    asked = config.resident_blocks
    count = sum(eligible) if isinstance(asked, str) else asked
    if count is not None and count > sum(eligible):
        raise ConfigurationError(
            [f"resident_blocks is {count} but the model has {sum(eligible)} resident-eligible blocks; use {ALL!r}"]
        )
    return choose_residents(
        [tensors.layout.nbytes for tensors in inventory.blocks],
        eligible,
        count=count,
        budget_bytes=config.resident_bytes,
        spread=config.resident_placement == "spread",
    )
