"""Assembling an offload from its components: the steps in order, each undone on the way back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from streamflow.attachment import Interceptions, around_staged, around_streamed, attach
from streamflow.binding.blocks import BlockBinder
from streamflow.binding.calls import Interception, MethodInterception
from streamflow.component_parts import BoundComponent, ComponentToOpen, bind_components
from streamflow.config import OffloadConfig
from streamflow.hardware import Hardware
from streamflow.moving import open_moving
from streamflow.pipelines.policy import Behaviour
from streamflow.ranks.joint_engine import JointEngine, agree_on_sources, agree_on_transfer, in_step, plan_jointly
from streamflow.runtime.admission import Admission
from streamflow.runtime.component import StreamedComponent
from streamflow.runtime.gates import gates_of
from streamflow.runtime.offload import Offload
from streamflow.runtime.sizes import sizes_of
from streamflow.runtime.staged_component import StagedComponent
from streamflow.runtime.workplace import Workplace
from streamflow.stages.devices.base import Device
from streamflow.stages.engine import Engine
from streamflow.stages.images import BlockImage
from streamflow.stages.opening import EngineOptions, open_engine
from streamflow.stages.places import Place
from streamflow.stages.residency import Residency
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.stages.walk_sources import SharedWalks, WalkSource
from streamflow.store.reports import StoreReport
from streamflow.trace.engine import EngineTrace
from streamflow.trace.tracing import Tracing, open_tracing
from streamflow.transfer_choice import TransferChoice
from streamflow.transfer_opening import choose_transfer_for, transfer_opener


@asynccontextmanager
async def open_components(
    components: Sequence[ComponentToOpen],
    config: OffloadConfig,
    hardware: Hardware,
    report: StoreReport | None = None,
    *,
    moves: bool = False,
) -> AsyncIterator[Offload]:
    """An offload on ``hardware`` over claimed components: one engine, one window, one admission.

    ``moves``: components come to the device for those who use them, and go; else all that is resident is so for good.
    """
    device = hardware.device
    async with open_threads() as crew, _opened(device, crew), open_tracing(config, device, crew) as tracing:
        bound: list[BoundComponent] = []
        offload = None
        try:
            bound.extend(bind_components(components, device))
            async with _open_bound(bound, hardware, crew, config, report, moves, tracing) as offload:
                yield offload
        finally:
            try:
                await _release(bound, crew)
            finally:
                if offload is not None:
                    offload.mark_closed()


async def _release(components: Sequence[BoundComponent], crew: ThreadCrew) -> None:
    """Release every source, the last one first, whatever fails or interrupts."""
    if components:
        try:
            await crew.call_through(components[-1].source.release)
        finally:
            await _release(components[:-1], crew)


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
    hardware: Hardware,
    crew: ThreadCrew,
    config: OffloadConfig,
    report: StoreReport | None,
    moves: bool,
    tracing: Tracing,
) -> AsyncIterator[Offload]:
    device, ranks, joint = hardware.device, hardware.ranks, None
    walks: WalkSource = SharedWalks(config.effective_passes_per_walk, config.admission_window_s)
    async with AsyncExitStack() as stack:
        attachments = [await stack.enter_async_context(attach(component, device, crew)) for component in components]
        if ranks is not None:
            tracing.join(ranks.group.index, ranks.group.size, ranks.run)
            await agree_on_sources(ranks, components, crew)
        choice = choose_transfer_for(config, device, components)
        if ranks is not None:
            choice = await agree_on_transfer(ranks, choice)
            joint = await plan_jointly(ranks, components, config, device, crew, walks, moves=moves)
            walks = joint.waves
        binder = BlockBinder([block for component in components for block in component.blocks])
        streamed = {c.name: c.images for c in components if c.given.behaviour is Behaviour.STREAMED}
        trace = tracing.engine(streamed)
        opened = _open_engine(components, streamed, binder, device, crew, config, choice, moves, trace, joint, walks)
        engine = await stack.enter_async_context(opened)
        residency = None
        if moves:
            fixed_bytes = sum(attachment.fixed.nbytes for attachment in attachments)
            in_waves = joint is not None
            moving = open_moving(components, binder, engine, device, crew, config, fixed_bytes, walks_in_waves=in_waves)
            residency = await stack.enter_async_context(moving)
        if joint is not None:
            await stack.enter_async_context(in_step(joint, engine, crew))
            choice = joint.describe(choice)
        opened_workplace = _open_workplace(engine, device, crew, residency, components, config, joint)
        workplace = await stack.enter_async_context(opened_workplace)
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
    joint: JointEngine | None,
    walks: WalkSource,
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
        open_transfer=trace.opener(transfer_opener(choice, images, config, trace, joint)),
        binder=binder,
        walk_source=walks,
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
    crew: ThreadCrew,
    residency: Residency | None,
    components: Sequence[BoundComponent],
    config: OffloadConfig,
    joint: JointEngine | None,
) -> AsyncIterator[Workplace]:
    gates = gates_of(components, config.stateful_modules)

    def clean(place: Place) -> None:
        workplace.clean(place)

    doorkeeper = crew.start("streamflow doorkeeper")
    admission = Admission(engine.places, clean, config.max_waiting_requests, doorkeeper)
    together = None if joint is None else joint.components_together
    workplace = Workplace(engine, device, admission, residency, gates, together)
    try:
        yield workplace
    finally:
        admission.cut()  # first: an interrupt at the beginning of the next call would leave the places' threads there
        await admission.close()
