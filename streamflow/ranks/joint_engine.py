"""What an engine of many ranks has that one rank's has not: blocks that are gathered, and waves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import attrs

from streamflow.component_parts import BoundComponent
from streamflow.config import OffloadConfig
from streamflow.errors import ConfigurationError
from streamflow.pipelines.policy import Behaviour
from streamflow.ranks.decisions import agree_on_choice, agree_on_registration
from streamflow.ranks.opening import Ranks
from streamflow.ranks.rates import measure_rates
from streamflow.ranks.schedule import schedule_digest
from streamflow.stages.devices.base import Device
from streamflow.stages.engine import Engine
from streamflow.stages.feed import Feed
from streamflow.stages.images import BlockImage
from streamflow.stages.places import Place
from streamflow.stages.ranks.errors import RanksDisagreeError
from streamflow.stages.ranks.local_blocks import choose_local
from streamflow.stages.ranks.slices import cannot_be_cut
from streamflow.stages.ranks.wave_walks import WaveWalks
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import ThreadCrew, open_tasks
from streamflow.stages.walk_sources import WalkSource
from streamflow.transfer_choice import TransferChoice


@attrs.frozen(eq=False)
class JointEngine:
    """How this rank's engine works with the others'. ``local`` are the names of images that it fetches whole."""

    ranks: Ranks
    waves: WaveWalks
    local: frozenset[str]
    num_gathered: int

    def components_together(self, place: Place) -> Collection[str]:
        """The components that the request in ``place`` walks over in its wave."""
        return self.waves.components_of(place.wave)

    def describe(self, choice: TransferChoice) -> TransferChoice:
        """``choice``, which says how slices get to the device, as that of whole blocks."""
        if not self.num_gathered:
            return choice
        reason = (
            f"{self.ranks.group.size} ranks copy slices ({choice.transfer}: {choice.transfer_reason}) of "
            f"{self.num_gathered} blocks and gather the rest"
        )
        return attrs.evolve(choice, transfer="gathered", transfer_reason=reason)


async def agree_on_sources(ranks: Ranks, components: Sequence[BoundComponent], crew: ThreadCrew) -> None:
    """Let no rank have another source, or another kind of memory, than the others.

    :raises RanksDisagreeError: if the sources of their weights are of different kinds, or are different files.
    """
    await ranks.agree_on_equal("the sources of the weights", {c.name: c.source.name for c in components})
    await ranks.agree_on_equal("the files of the weights", {c.name: c.source.evidence for c in components})
    for component in components:
        source = component.source
        problem = await agree_on_registration(ranks.coordinator, component.name, source.registration)
        if problem is not None and source.registration.problem is None:
            await crew.call(partial(source.unregister, problem), name="unregistering")


async def agree_on_transfer(ranks: Ranks, choice: TransferChoice) -> TransferChoice:
    """The transfer that all ranks can do.

    :raises RanksDisagreeError: if they stream from different sources.
    """
    decision = await agree_on_choice(ranks.coordinator, choice)
    if decision.problem is not None:
        raise RanksDisagreeError(f"the source of the weights: {decision.problem}", [choice.source])
    return decision.choice


async def plan_jointly(
    ranks: Ranks,
    components: Sequence[BoundComponent],
    config: OffloadConfig,
    device: Device,
    crew: ThreadCrew,
    walks: WalkSource,
    *,
    moves: bool,
) -> JointEngine:
    """What the ranks gather: the streamed blocks of components that do, and the residents that are loaded at opening.
    ``walks`` are this rank's own, between waves.

    All ranks have to come to the same, which is compared.

    :raises ConfigurationError: if ``local_blocks`` names what is no block.
    :raises RanksDisagreeError: if the ranks would not gather the same.
    """
    orders = {c.name: _streamed(c) for c in components if c.given.behaviour is Behaviour.STREAMED and c.given.gathers}
    shared = {c.name: _gathered(c, moves) for c in components if c.name in orders}
    eligible = {image.name: image.nbytes for images in shared.values() for image in images}
    local = await _local_blocks(ranks, eligible, config, device, crew)
    local |= cannot_be_cut([image for images in shared.values() for image in images])
    others = {image.name for c in components for image in c.images.values()} - eligible.keys()
    digest = schedule_digest(shared, local=local, chunk_bytes=config.ranks.gather_chunk_bytes, size=ranks.group.size)
    await ranks.agree_on_equal("what they gather", digest)
    waves = WaveWalks(Feed(orders), walks, config.ranks.default_wave, let_go_after_s=ranks.options.let_go_after_s)
    return JointEngine(ranks, waves, frozenset(local | others), len(eligible) - len(local))


def _streamed(component: BoundComponent) -> list[int]:
    return [number for number in component.images if number not in component.residents]


def _gathered(component: BoundComponent, moves: bool) -> list[BlockImage]:
    """Residents that move come when this rank needs them, so alone."""
    alone = component.residents if moves else ()
    return [image for number, image in component.images.items() if number not in alone]


async def _local_blocks(
    ranks: Ranks, eligible: Mapping[str, int], config: OffloadConfig, device: Device, crew: ThreadCrew
) -> frozenset[str]:
    wanted = config.ranks.local_blocks
    if isinstance(wanted, tuple):
        unknown = [name for name in wanted if name not in eligible]
        if unknown:
            raise ConfigurationError(
                [f"local_blocks names {', '.join(unknown)}; the blocks that ranks gather are {', '.join(eligible)}"]
            )
        return frozenset(wanted)
    if wanted == "none" or not eligible:
        return frozenset()
    if device.is_host:  # it has the weights at hand
        return frozenset(eligible)
    rates = await measure_rates(ranks, device, crew)
    return choose_local(
        eligible,
        link_bytes_per_s=rates.link_bytes_per_s,
        gather_bytes_per_s=rates.gather_bytes_per_s,
        gather_latency_s=rates.gather_latency_s,
        size=ranks.group.size,
    )


@asynccontextmanager
async def in_step(joint: JointEngine, engine: Engine, crew: ThreadCrew) -> AsyncIterator[None]:
    """``engine`` takes part in the ranks' waves. A failure of it goes to the other ranks, and theirs breaks it.

    Leaving waits for the wave under way, which this rank feeds to its end; no request of this rank may run any more.
    """
    coordinator, communicator, waves = joint.ranks.coordinator, joint.ranks.communicator, joint.waves
    failed = LoopEvent()

    async def tell_failure() -> None:
        await failed.wait()
        if engine.failure is not None:
            coordinator.report(engine.failure)
            await crew.call_through(communicator.abort)

    async with open_tasks() as tasks:
        engine.on_failure = failed.set
        waves.wake, waves.on_failure, waves.standing_passes = engine.wake, engine.fail, engine.standing_passes
        tasks.start_soon(tell_failure, name="failure of the engine")
        coordinator.attach(waves)
        try:
            yield
        finally:
            waves.release_members()
            try:
                await coordinator.close()
            finally:
                failed.set()
