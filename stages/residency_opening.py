"""Opening and closing a residency: the order in which its tasks and its device memory go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from streamflow.stages.devices.base import Device
from streamflow.stages.movables import Movable
from streamflow.stages.observers import Broadcast
from streamflow.stages.residency import Residency
from streamflow.stages.retention_observer import RetentionObserver
from streamflow.stages.threads import ThreadCrew, open_tasks
from streamflow.stages.transfers.base import Transfer


@asynccontextmanager
async def open_residency(
    movables: Iterable[Movable],
    *,
    budget_bytes: int | None,
    device: Device,
    transfer: Transfer,
    crew: ThreadCrew,
    broadcast: Broadcast,
    is_busy: Callable[[], bool],
    fail: Callable[[BaseException], None],
) -> AsyncIterator[Residency]:
    """The residency of ``movables`` (names are distinct), within ``budget_bytes`` of device memory (None: no limit).

    The caller sees to it that no thread is inside a component any more when it leaves. Leaving, also under
    cancellation: moves under way are finished, everything is taken away, the allocator's cache is given back.
    """
    residency: Residency | None = None
    try:
        async with open_tasks() as nursery:
            retention = RetentionObserver(device, crew, broadcast, is_busy, fail)
            residency = Residency(
                movables,
                budget_bytes=budget_bytes,
                transfer=transfer,
                crew=crew,
                nursery=nursery,
                broadcast=broadcast,
                retention=retention,
                fail=fail,
            )
            nursery.start_soon(residency.serve, name="residency")
            nursery.start_soon(retention.serve, name="retention")
            try:
                yield residency
            finally:
                retention.stop()
                residency.stop()
    finally:
        if residency is not None:
            try:
                residency.unbind_all()
            finally:
                try:
                    await crew.call_through(residency.free_all)
                finally:
                    await crew.call_through(device.release_cache)
