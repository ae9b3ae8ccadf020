"""A model that is ready to stream, whichever way it came to its weights, and the opening of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import attrs
from torch import nn

from streamflow.binding.blocks import BoundBlock
from streamflow.binding.inventory import Inventory
from streamflow.component_parts import MakeSource
from streamflow.config import OffloadConfig
from streamflow.hardware import Hardware
from streamflow.host_weights.ownership import Ownership
from streamflow.host_weights.restorer import ArtifactSource
from streamflow.opening import open_with_source
from streamflow.runtime.offload import Offload
from streamflow.stages.devices.base import Device
from streamflow.stages.threads import open_tasks
from streamflow.store.lease import Lease
from streamflow.store.reports import StoreReport
from streamflow.store.store import HostWeightStore
from streamflow.weights.skeleton import lend_placeholders
from streamflow.weights.source import WeightSource


@attrs.frozen(kw_only=True, eq=False)
class Ready:
    """A claimed model, its inventory, and what it streams from.

    ``lease`` is that of the entry it streams from; None: it streams from its own tensors. ``is_verified``: the entry's
    bytes are known to be right. ``is_skeleton``: the model has no values of its own.
    """

    model: nn.Module
    inventory: Inventory
    make_source: MakeSource
    report: StoreReport
    lease: Lease | None = None
    is_verified: bool = False
    is_skeleton: bool = False


@attrs.frozen(eq=False)
class HeldLease:
    """A lease until a source takes it over: only the source knows when it must not be closed yet."""

    lease: Lease
    _closing: ExitStack

    @classmethod
    def of(cls, lease: Lease, stack: AsyncExitStack) -> HeldLease:
        """``lease``, closed by ``stack`` unless it is handed over."""
        closing = ExitStack()
        closing.callback(lease.close)
        stack.callback(closing.close)
        return cls(lease, closing)

    def hand_over(self) -> None:
        """The lease is somebody else's to close from here on."""
        self._closing.pop_all()


def from_entry(
    ownership: Ownership, held: HeldLease, config: OffloadConfig, reason: str, *, in_module: bool
) -> MakeSource:
    """Makes the source that streams from a lease, which becomes the source's to close."""

    def make_source(inventory: Inventory, blocks: tuple[BoundBlock, ...], backend: Device) -> WeightSource:
        source = ArtifactSource(blocks, held.lease, ownership, config, reason, in_module=in_module)
        held.hand_over()
        return source

    return make_source


@asynccontextmanager
async def open_ready(
    ready: Ready, config: OffloadConfig, hardware: Hardware, store: HostWeightStore | None
) -> AsyncIterator[Offload]:
    """The offload of a model that is ready."""
    async with AsyncExitStack() as stack:
        inventory = ready.inventory
        if ready.is_skeleton:
            inventory = inventory.with_tensors(stack.enter_context(lend_placeholders(ready.model)))
        opened = open_with_source(ready.model, inventory, config, ready.make_source, hardware, ready.report)
        offload = await stack.enter_async_context(opened)
        await stack.enter_async_context(verified_meanwhile(store, [ready], offload))
        yield offload


@asynccontextmanager
async def verified_meanwhile(
    store: HostWeightStore | None, used: Iterable[Ready], offload: Offload
) -> AsyncIterator[None]:
    """Check the digests of the entries in use, if that is asked for and was not done yet, one after the other. Damage
    breaks the offload, and puts the entry aside.
    """
    in_background = offload.config.store.verification == "background"
    leases = [ready.lease for ready in used if ready.lease is not None and in_background and not ready.is_verified]

    async def verify(store: HostWeightStore) -> None:
        try:
            for lease in leases:
                await store.verify(lease, num_threads=1)  # requests run beside it, and need cores and memory more
        except Exception as damage:  # what cannot be verified must not be used either
            offload.fail(damage)

    async with open_tasks() as tasks:
        if store is not None:
            tasks.start_soon(verify, store, name="verification of the stored weights")
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
