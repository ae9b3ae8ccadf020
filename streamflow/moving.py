"""What of an offload's components comes to the device and goes, within which budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from streamflow.binding.blocks import BlockBinder
from streamflow.component_parts import BoundComponent
from streamflow.config import OffloadConfig
from streamflow.errors import DeviceBudgetError
from streamflow.pipelines.policy import Behaviour
from streamflow.ranks.errors import WaveBudgetError
from streamflow.stages.devices.base import Device
from streamflow.stages.engine import Engine
from streamflow.stages.movables import Movable
from streamflow.stages.residency import Residency
from streamflow.stages.residency_opening import open_residency
from streamflow.stages.threads import ThreadCrew


def open_moving(
    components: Sequence[BoundComponent],
    binder: BlockBinder,
    engine: Engine,
    device: Device,
    crew: ThreadCrew,
    config: OffloadConfig,
    fixed_bytes: int,
    *,
    walks_in_waves: bool = False,
) -> AbstractAsyncContextManager[Residency]:
    """The residency of all components that are not resident for good, each by its name.

    ``walks_in_waves``: requests wait for those of other ranks, holding the component that they walk over.

    :raises DeviceBudgetError: if one cannot be there within ``device_budget_bytes``, beside what always is.
    :raises WaveBudgetError: if those that requests may hold while they wait leave no room to the others.
    """
    movables = [
        Movable(component.name, component.moving, binder, device, engine.blocks_there)
        for component in components
        if component.given.behaviour is not Behaviour.RESIDENT
    ]
    left = _budget_left(movables, engine, config.device_budget_bytes, fixed_bytes)
    if walks_in_waves and config.max_running_requests > 1 and left is not None:
        _check_waves(components, left, config.device_budget_bytes or 0)
    return open_residency(
        movables,
        budget_bytes=left,
        device=device,
        transfer=engine.transfer,
        crew=crew,
        broadcast=engine.broadcast,
        is_busy=lambda: engine.is_busy,
        fail=engine.fail,
    )


def _budget_left(movables: Sequence[Movable], engine: Engine, budget: int | None, fixed_bytes: int) -> int | None:
    if budget is None:
        return None
    statistics = engine.statistics()
    always = statistics.window_bytes + statistics.scratch_bytes + statistics.resident_bytes + fixed_bytes
    for movable in movables:
        if always + movable.nbytes > budget:
            raise DeviceBudgetError(movable.name, movable.nbytes, always, budget)
    return budget - always


def _check_waves(components: Sequence[BoundComponent], left: int, budget: int) -> None:
    """Where a wave goes from one component to another: all of these fit beside one that does not walk.

    So a request in a wave finds room, whoever waits for the next one or for room himself.
    """
    nbytes = {c.name: sum(image.nbytes for image in c.moving.values()) for c in components}
    walking = [c.name for c in components if c.given.behaviour is Behaviour.STREAMED]
    whole = [nbytes[c.name] for c in components if c.given.behaviour is Behaviour.STAGED]
    residents = sum(nbytes[name] for name in walking)
    needed = residents + max(whole, default=0)
    if len(walking) > 1 and residents and needed > left:
        raise WaveBudgetError(walking, needed, left, budget)
