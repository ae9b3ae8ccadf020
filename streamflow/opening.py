"""Opening: the steps from a model and a source of its weights to an offload, each undone on the way back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from torch import nn

from streamflow.attachment import Interceptions, around_staged, around_streamed, attach
from streamflow.binding.blocks import BlockBinder, BoundBlock
from streamflow.binding.calls import Interception, MethodInterception
from streamflow.binding.guards import claimed
from streamflow.binding.inventory import Inventory, take_inventory
from streamflow.component_parts import BoundComponent, ComponentToOpen, MakeSource, bind_components
from streamflow.config import ALL, OffloadConfig
from streamflow.discovery import find_blocks
from streamflow.errors import ComponentPolicyError, ConfigurationError
from streamflow.moving import open_moving
from streamflow.pipelines.policy import Behaviour
from streamflow.residency import choose_residents
from streamflow.runtime.admission import Admission
from streamflow.runtime.component import StreamedComponent
from streamflow.runtime.gates import gates_of
from streamflow.runtime.offload import Offload
from streamflow.runtime.sizes import sizes_of
from streamflow.runtime.staged_component import StagedComponent
from streamflow.runtime.workplace import Workplace
from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.engine import Engine
from streamflow.stages.images import BlockImage
from streamflow.stages.opening import EngineOptions, OpenTransfer, open_engine
from streamflow.stages.places import Place
from streamflow.stages.residency import Residency
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
    if config.components:
        raise ComponentPolicyError("components is about a pipeline's encoders and VAEs, and this is one model", ())
    name, residents = type(model).__name__, resident_blocks(inventory, config)
    component = ComponentToOpen(name, model, Behaviour.STREAMED, inventory, make_source, residents, report)
    async with open_components([component], config, device, report) as offload:
        yield offload


@asynccontextmanager
async def open_components(
    components: Sequence[ComponentToOpen],
    config: OffloadConfig,
    device: Device | None,
    report: StoreReport | None = None,
    *,
    moves: bool = False,
) -> AsyncIterator[Offload]:
    """An offload over claimed components: one engine, one window, one admission. The steps in order, each undone on
    the way back.

    ``moves``: components come to the device for those who use them, and go; else all that is resident is so for good.
    """
    backend = backend_of(device, config)
    async with AsyncExitStack() as stack:
        crew = await stack.enter_async_context(open_threads())
        await stack.enter_async_context(_opened(backend, crew))
        tracing = await stack.enter_async_context(open_tracing(config, backend, crew))
        sources = await stack.enter_async_context(AsyncExitStack())
        bound = []
        for component in bind_components(components, backend):
            sources.push_async_callback(crew.call_through, component.source.release)
            bound.append(component)
        offload = None
        try:
            async with _open_bound(bound, backend, crew, config, report, moves, tracing) as offload:
                yield offload
        finally:
            try:
                await sources.aclose()
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
async def _open_bound(
    components: Sequence[BoundComponent],
    device: Device,
    crew: ThreadCrew,
    config: OffloadConfig,
    report: StoreReport | None,
    moves: bool,
    tracing: Tracing,
) -> AsyncIterator[Offload]:
    async with AsyncExitStack() as stack:
        attachments = [await stack.enter_async_context(attach(component, device, crew)) for component in components]
        choice = _choose(config, device, components)
        binder = BlockBinder([block for component in components for block in component.blocks])
        streamed = {c.name: c.images for c in components if c.given.behaviour is Behaviour.STREAMED}
        trace = tracing.engine(streamed)
        opened = _open_engine(components, streamed, binder, device, crew, config, choice, moves, trace)
        engine = await stack.enter_async_context(opened)
        residency = None
        if moves:
            fixed_bytes = sum(attachment.fixed.nbytes for attachment in attachments)
            moving = open_moving(components, binder, engine, device, crew, config, fixed_bytes)
            residency = await stack.enter_async_context(moving)
        workplace = await stack.enter_async_context(_open_workplace(engine, device, residency, components, config))
        trace.attach(engine)
        interceptions = Interceptions(_interceptions(components, engine, device, workplace))
        offload = Offload(
            config=config,
            device=device,
            engine=engine,
            workplace=workplace,
            residency=residency,
            choice=choice,
            registration=components[0].source.registration,
            sizes=sizes_of(components, attachments),
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


def _open_engine(
    components: Sequence[BoundComponent],
    streamed: Mapping[str, Mapping[int, BlockImage]],
    binder: BlockBinder,
    device: Device,
    crew: ThreadCrew,
    config: OffloadConfig,
    choice: TransferChoice,
    moves: bool,
    trace: EngineTrace,
) -> AbstractAsyncContextManager[Engine]:
    residents = [number for component in components for number in component.residents]
    images = [image for component in components for image in component.images.values()]
    return open_engine(
        device=trace.device(device),
        crew=crew,
        components=streamed,
        residents=() if moves else residents,
        movable=residents if moves else (),
        options=EngineOptions(
            window_slots=config.window_blocks,
            num_places=config.max_running_requests,
            run_ahead_blocks=config.run_ahead_blocks,
            poison_freed_slots=config.poison_freed_slots,
        ),
        open_transfer=trace.opener(_transfer_opener(choice, images, config, trace)),
        binder=binder,
        walk_source=SharedWalks(config.effective_passes_per_walk, config.admission_window_s),
    )


def _interceptions(
    components: Sequence[BoundComponent], engine: Engine, device: Device, workplace: Workplace
) -> Iterator[Interception | MethodInterception]:
    for component in components:
        given = component.given
        if given.behaviour is Behaviour.STREAMED:
            modules = [tensors.block.module for tensors in given.inventory.blocks]
            streamed = StreamedComponent(given.name, engine, component.blocks, workplace, component.first_block)
            yield from around_streamed(given.module, modules, streamed)
        elif given.behaviour is Behaviour.STAGED:
            staged = StagedComponent(given.name, component.blocks[0], device, workplace)
            yield from around_staged(given.module, staged)


@asynccontextmanager
async def _open_workplace(
    engine: Engine,
    device: Device,
    residency: Residency | None,
    components: Sequence[BoundComponent],
    config: OffloadConfig,
) -> AsyncIterator[Workplace]:
    gates = gates_of(components, config.stateful_modules)

    def clean(place: Place) -> None:
        workplace.clean(place)

    admission = Admission(engine.places, clean, config.max_waiting_requests)
    workplace = Workplace(engine, device, admission, residency, gates)
    try:
        yield workplace
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


def _choose(config: OffloadConfig, device: Device, components: Sequence[BoundComponent]) -> TransferChoice:
    """The transfer of all blocks; a pipeline's components all have sources of one kind."""
    sources = [component.source for component in components]
    first = next((source for source in sources if source.images), sources[0])
    why_not_direct = next((source.why_not_direct for source in sources if source.why_not_direct), None)
    why_not_registered = next((s.registration.problem for s in sources if s.registration.problem), None)
    candidate = SourceCandidate(first.name, first.reason, why_not_direct=why_not_direct)
    return choose([candidate], config, device_is_host=device.is_host, why_not_registered=why_not_registered)


def _transfer_opener(
    choice: TransferChoice, images: Sequence[BlockImage], config: OffloadConfig, trace: EngineTrace
) -> OpenTransfer:
    async def open_transfer(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        if choice.transfer == "direct":
            return DirectTransfer(stream, reads_any_memory=device.is_host)
        return await open_staged(
            device,
            stream,
            crew,
            images,
            num_threads=config.effective_packing_threads,
            chunk_bytes=config.staging_chunk_bytes,
            on_packed=trace.packed_listener,
        )

    return open_transfer
