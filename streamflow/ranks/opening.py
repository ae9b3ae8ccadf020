"""The ranks that gather, connected: opened before anything of a model is decided, closed after it is given back."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs

from streamflow.config import OffloadConfig
from streamflow.ranks.fingerprint import differing, fingerprint
from streamflow.ranks.matrix import Axis
from streamflow.ranks.nodes import check_one_node, own_node
from streamflow.ranks.topology import GatherGroup
from streamflow.stages.devices.base import Device
from streamflow.stages.ranks.communicator import TorchCommunicator, new_communicator
from streamflow.stages.ranks.coordinator import Coordinator, open_coordinator
from streamflow.stages.ranks.errors import RanksDisagreeError
from streamflow.stages.ranks.meeting import default_store
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.star import open_star
from streamflow.stages.threads import ThreadCrew, open_tasks, open_threads

#: Under NCCL a gather waits as long as its ranks are heard of: its own timeout, which ends the process, must not come.
NCCL_TIMEOUT_S = 24 * 3600.0


@attrs.frozen(eq=False)
class Ranks:
    """The ranks that this one gathers with. ``coordinator`` keeps them in step; blocks go over ``communicator``.

    ``run``: what all of them, and no others, call their time together. ``options``: how they wait for each other.
    """

    group: GatherGroup
    coordinator: Coordinator
    communicator: TorchCommunicator
    run: str
    options: WaveOptions

    async def agree_on_equal(self, what: str, value: Any) -> None:
        """Return if all ranks have the same ``value``, one for JSON.

        :raises RanksDisagreeError: if they have not; on all of them alike.
        :raises RankError: if a rank is gone.
        """
        values = await self.coordinator.agree(what, value)
        fields = differing(values) if isinstance(value, dict) else []
        if fields or any(other != values[0] for other in values):
            named = [{name: _field(v, name) for name in fields} for v in values] if fields else values
            raise RanksDisagreeError(what, named, fields)

    async def open_together(self, last_step: Callable[[], Awaitable[None]]) -> None:
        """Do what is left of opening, and return once every rank has: nobody's requests meet a rank that still opens.

        :raises RankError: if a rank is gone, or failed.
        """
        try:
            await last_step()
        except Exception as failure:
            self.coordinator.report(failure)
            raise
        await self.coordinator.agree("open", None)


def _field(values: Any, path: str) -> Any:
    """The field ``path`` of nested mappings; None if it is not there."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


@asynccontextmanager
async def open_ranks(group: GatherGroup, config: OffloadConfig, device: Device) -> AsyncIterator[Ranks]:
    """The ranks of ``group``, which all open theirs. They have the same configuration and are on one node.

    :raises RankError: if a rank does not come, or is gone.
    :raises RanksDisagreeError: if they are configured differently.
    :raises NodesDifferError: if they are on several nodes.
    :raises GatherError: if they cannot be connected.
    """
    name = f"streamflow/{'-'.join(map(str, group.ranks))}"
    options = _wave_options(config, group)
    async with (
        open_threads() as crew,
        open_star(
            crew,
            default_store(),
            name,
            rank=group.index,
            size=group.size,
            timeout_s=config.ranks.rank_deadline_s,
        ) as star,
        open_coordinator(star, crew, options) as coordinator,
    ):
        check_one_node(group, await coordinator.agree("node", own_node().to_wire()))
        run = (await coordinator.agree("run", uuid.uuid4().hex))[0]
        communicator = await _connect(run, group, config, device, coordinator, crew)
        try:
            async with _giving_up(coordinator, communicator, crew):
                ranks = Ranks(group, coordinator, communicator, run, options)
                await ranks.agree_on_equal("configuration", fingerprint(config))
                yield ranks
        finally:
            await crew.call_through(communicator.close)


@asynccontextmanager
async def _giving_up(
    coordinator: Coordinator, communicator: TorchCommunicator, crew: ThreadCrew
) -> AsyncIterator[None]:
    """Gathers end here when a rank will not come to them: on an accelerator nothing else ends what is queued."""

    async def give_up() -> None:
        await coordinator.wait_until_broken_off()
        await crew.call_through(communicator.abort)

    async with open_tasks() as tasks:
        tasks.start_soon(give_up, name="giving up gathers")
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


def _wave_options(config: OffloadConfig, group: GatherGroup) -> WaveOptions:
    ranks = config.ranks
    return WaveOptions(
        max_passes=config.effective_passes_per_walk,
        window_s=ranks.wave_window_s,
        deadline_s=ranks.wave_deadline_s,
        rank_deadline_s=ranks.rank_deadline_s,
        heartbeat_s=ranks.heartbeat_s,
        member_deadline_s=ranks.member_deadline_s,
        needs_all_ranks=group.axis is Axis.SEQUENCE_PARALLEL,  # these share each request
    )


async def _connect(
    run: str, group: GatherGroup, config: OffloadConfig, device: Device, coordinator: Coordinator, crew: ThreadCrew
) -> TorchCommunicator:
    connect = partial(
        new_communicator,
        default_store(),
        f"streamflow/gather/{run}",
        group.index,
        group.size,
        device.torch_device,
        timeout_s=config.ranks.rank_deadline_s if device.is_host else NCCL_TIMEOUT_S,
        blame=coordinator.blame,
    )
    return await crew.call(connect, undo=TorchCommunicator.close, name="communicator")
