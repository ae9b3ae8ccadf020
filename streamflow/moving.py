"""What of an offload's components comes to the device and goes, within which budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from streamflow.binding.blocks import BlockBinder
from streamflow.component_parts import BoundComponent
from streamflow.config import OffloadConfig
from streamflow.errors import DeviceBudgetError
from streamflow.pipelines.policy import Behaviour
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
) -> AbstractAsyncContextManager[Residency]:
    """The residency of all components that are not resident for good, each by its name.

    :raises DeviceBudgetError: if one cannot be there within ``device_budget_bytes``, beside what always is.
    """
    movables = [
        Movable(component.name, component.moving, binder, device, engine.blocks_there)
        for component in components
        if component.given.behaviour is not Behaviour.RESIDENT
    ]
    return open_residency(
        movables,
        budget_bytes=_budget_left(movables, engine, config.device_budget_bytes, fixed_bytes),
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
