"""Opening: the steps from a model and a source of its weights to an offload, each undone on the way back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import nn

from streamflow.attachment import Interceptions, attach
from streamflow.binding.blocks import BoundBlock
from streamflow.binding.guards import claimed
from streamflow.binding.inventory import Inventory, take_inventory
from streamflow.binding.module_state import find_stateful
from streamflow.binding.poison import Poison
from streamflow.config import ALL, OffloadConfig
from streamflow.discovery import find_blocks
from streamflow.errors import ConfigurationError
from streamflow.residency import choose_residents
from streamflow.runtime.admission import Admission
from streamflow.runtime.component import StreamedComponent
from streamflow.runtime.offload import ModelSizes, Offload
from streamflow.runtime.state_gate import StateGate
from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.engine import Engine
from streamflow.stages.opening import EngineOptions, open_engine
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.transfers.direct import DirectTransfer
from streamflow.stages.transfers.staged import open_staged
from streamflow.stages.walk_sources import SharedWalks
from streamflow.store.reports import StoreReport
from streamflow.support import check_model, check_not_compiled_whole
from streamflow.trace.engine import EngineTrace
from streamflow.trace.tracing import Tracing, open_tracing
from streamflow.transfer_choice import SourceCandidate, TransferChoice, choose, why_not_page_locked
from streamflow.weights.source import ModuleSource, WeightSource

#: Makes the source once the blocks are known.
MakeSource = Callable[[Inventory, tuple[BoundBlock, ...], Device], WeightSource]


@asynccontextmanager
async def open_module(
    model: nn.Module, config: OffloadConfig, reason: str, device: Device | None, report: StoreReport | None = None
) -> AsyncIterator[Offload]:
    """An offload of a loaded model that streams from the model's own tensors, for which ``reason`` is given.

    :raises UnsupportedModelError: if the model is none, or is not on the host.
    """
    check_model(model)
    with claimed(model, type(model).__name__):
        inventory = inventory_of(model, config)
        async with open_with_source(model, inventory, config, module_source(config, reason), device, report) as offload:
            yield offload


def module_source(config: OffloadConfig, reason: str) -> MakeSource:
    """Makes the source that is the model itself."""

    def make_source(inventory: Inventory, blocks: tuple[BoundBlock, ...], backend: Device) -> WeightSource:
        pins = why_not_page_locked(config, device_is_host=backend.is_host) is None
        return ModuleSource(inventory, blocks, reason, config.effective_packing_threads if pins else None)

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


@asynccontextmanager
async def open_with_source(
    model: nn.Module,
    inventory: Inventory,
    config: OffloadConfig,
    make_source: MakeSource,
    device: Device | None,
    report: StoreReport | None = None,
) -> AsyncIterator[Offload]:
    """An offload of a claimed model that streams from any source; ``report`` is what the store did for it."""
    backend = backend_of(device, config)
    residents = _residents(inventory, config)
    poison = Poison(backend.torch_device)
    bound = tuple(BoundBlock(tensors, poison) for tensors in inventory.blocks)
    async with open_threads() as crew, _opened(backend, crew), open_tracing(config, backend, crew) as tracing:
        source = make_source(inventory, bound, backend)
        offload = None
        try:
            async with _open_attached(
                model, inventory, bound, residents, source, backend, crew, config, report, tracing
            ) as offload:
                yield offload
        finally:
            try:
                await crew.call_through(source.release)
            finally:
                if offload is not None:
                    offload.mark_closed()


@asynccontextmanager
async def _opened(device: Device, crew: ThreadCrew) -> AsyncIterator[None]:
    await device.open(crew)
    try:
        yield
    finally:
        device.close()


@asynccontextmanager
async def _open_attached(
    model: nn.Module,
    inventory: Inventory,
    bound: tuple[BoundBlock, ...],
    residents: tuple[int, ...],
    source: WeightSource,
    device: Device,
    crew: ThreadCrew,
    config: OffloadConfig,
    report: StoreReport | None,
    tracing: Tracing,
) -> AsyncIterator[Offload]:
    name = type(model).__name__
    async with attach(model, name, inventory, bound, source, device, crew) as attachment:
        choice = _choose(config, device, source)
        trace = tracing.engine({name: source.images})
        opened = open_engine(
            device=trace.device(device),
            crew=crew,
            components={name: source.images},
            residents=residents,
            options=EngineOptions(
                window_slots=config.window_blocks,
                num_places=config.max_running_requests,
                run_ahead_blocks=config.run_ahead_blocks,
                poison_freed_slots=config.poison_freed_slots,
            ),
            open_transfer=trace.opener(_transfer_opener(choice, source, config, trace)),
            binder=attachment.binder,
            walk_source=SharedWalks(config.effective_passes_per_walk, config.admission_window_s),
        )
        async with opened as engine, _open_admission(engine, config) as admission:
            trace.attach(engine)
            stateful = find_stateful(model, config.stateful_modules)
            streamed = frozenset(key for block in bound for key, _ in block.identities())
            gate = StateGate(model, stateful, streamed, watched=config.stateful_modules is None and not stateful)
            component = StreamedComponent(name, engine, bound, device, admission, gate)
            modules = [tensors.block.module for tensors in inventory.blocks]
            interceptions = Interceptions(model, modules, component)
            offload = Offload(
                config=config,
                device=device,
                engine=engine,
                component=component,
                admission=admission,
                gate=gate,
                choice=choice,
                registration=source.registration,
                sizes=_sizes(inventory, len(residents), attachment.fixed.nbytes, source),
                store_report=report,
                tracing=tracing,
            )
            try:
                interceptions.install()
                yield offload
            finally:
                try:
                    await offload.drain()
                finally:
                    interceptions.remove()


@asynccontextmanager
async def _open_admission(engine: Engine, config: OffloadConfig) -> AsyncIterator[Admission]:
    admission = Admission(engine.places, engine.end_request, config.max_waiting_requests)
    try:
        yield admission
    finally:
        await admission.close()


def backend_of(device: Device | None, config: OffloadConfig) -> Device:
    """``device``, or the backend that the configuration names.

    :raises ConfigurationError: if ``device`` is the name of one.
    """
    if isinstance(device, (str, torch.device)):
        raise ConfigurationError(
            [f"device= takes a backend; to name a device, use the option: {{'device': '{device}'}}"]
        )
    return device if device is not None else make_device(config)


def make_device(config: OffloadConfig) -> Device:
    """The backend that the configuration names."""
    device = config.torch_device()
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def _residents(inventory: Inventory, config: OffloadConfig) -> tuple[int, ...]:
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


def _choose(config: OffloadConfig, device: Device, source: WeightSource) -> TransferChoice:
    candidate = SourceCandidate(source.name, source.reason, why_not_direct=source.why_not_direct)
    why_not_registered = source.registration.problem
    return choose([candidate], config, device_is_host=device.is_host, why_not_registered=why_not_registered)


def _transfer_opener(
    choice: TransferChoice, source: WeightSource, config: OffloadConfig, trace: EngineTrace
) -> Callable[[Device, Stream, ThreadCrew], Any]:
    async def open_transfer(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        if choice.transfer == "direct":
            return DirectTransfer(stream, reads_any_memory=device.is_host)
        return await open_staged(
            device,
            stream,
            crew,
            list(source.images.values()),
            num_threads=config.effective_packing_threads,
            chunk_bytes=config.staging_chunk_bytes,
            on_packed=trace.packed_listener,
        )

    return open_transfer


def _sizes(inventory: Inventory, num_residents: int, fixed_bytes: int, source: WeightSource) -> ModelSizes:
    owned = [*inventory.fixed, *(tensor for block in inventory.blocks for tensor in block.tensors)]
    return ModelSizes(
        num_blocks=len(inventory.blocks),
        num_resident_blocks=num_residents,
        model_bytes=sum(tensor.tensor.numel() * tensor.tensor.element_size() for tensor in owned),
        block_bytes=inventory.streamable_bytes,
        fixed_bytes=fixed_bytes,
        host_image_bytes=source.host_image_bytes,
    )
