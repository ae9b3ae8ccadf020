"""Sharing a loaded model's weights: publishing them, or finding them published, and letting the model use the entry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
from torch import nn

from streamflow.binding.guards import claimed
from streamflow.binding.inventory import Inventory, take_again
from streamflow.config import OffloadConfig
from streamflow.hardware import Hardware
from streamflow.host_weights.errors import EntryMissingError, report_or_raise
from streamflow.host_weights.identity import SourceIdentity
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.ownership import Ownership, check_boundary, ownership_of
from streamflow.host_weights.producer import draft_of_module
from streamflow.host_weights.ready import HeldLease, Ready, from_entry, open_ready
from streamflow.host_weights.remapping import give_memory_back, remap
from streamflow.host_weights.restorer import check_restorable
from streamflow.host_weights.support import check_not_quantized, check_topology
from streamflow.opening import inventory_of, module_source
from streamflow.ranks.joint_store import agreed_on_store
from streamflow.runtime.offload import Offload
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.store.draft import Draft
from streamflow.store.errors import EntryRejectedError, StoreError
from streamflow.store.hashing import Progress
from streamflow.store.lease import Lease
from streamflow.store.reports import StoreOutcome, StoreReport
from streamflow.store.store import HostWeightStore, open_store
from streamflow.support import check_model


@asynccontextmanager
async def open_shared(
    model: nn.Module, config: OffloadConfig, inputs: LoadInputs, hardware: Hardware
) -> AsyncIterator[Offload]:
    """An offload of a loaded model through the store, by its content.

    :raises StoreError: if the store must be used and cannot; its ``report`` says so.
    """
    check_model(model)
    async with open_threads() as crew, AsyncExitStack() as stack:
        stack.enter_context(claimed(model, type(model).__name__))
        inventory = await crew.call(lambda: inventory_of(model, config), name="inventory")
        loaded = Loaded(type(model).__name__, model, inventory, config, inputs, hardware)
        store = None
        try:
            store = await stack.enter_async_context(open_store(config.store, crew))
        except StoreError as failure:
            ready = loaded.without_entry(failure, None)
        else:
            ready = await share_loaded(store, crew, stack, loaded, None)
        ready = await on_all_ranks(loaded, ready)
        yield await stack.enter_async_context(open_ready(ready, config, hardware, store))


@attrs.frozen(eq=False)
class Loaded:
    """A loaded, finished and claimed model, which is the component ``name``."""

    name: str
    model: nn.Module
    inventory: Inventory
    config: OffloadConfig
    inputs: LoadInputs
    hardware: Hardware

    def draft(self, identity_inputs: Mapping[str, Any] | None) -> tuple[Ownership, Draft]:
        """What would be published of it.

        :raises NotStorableError: if it cannot be stored.
        """
        check_topology(self.config.topology, self.inputs)
        check_not_quantized(self.model)
        check_boundary(self.inventory, self.inputs.neighbours)
        ownership = ownership_of(self.model, self.inventory)
        return ownership, draft_of_module(ownership, self.inventory, metadata_of(self.model, identity_inputs))

    def without_entry(self, failure: StoreError, source_id: str | None) -> Ready:
        """The model, ready to stream from its own tensors because of ``failure``.

        :raises StoreError: ``failure`` itself, if the store must be used or it is a mistake.
        """
        report = report_or_raise(failure, source_id, is_required=self.config.store_mode == "required")
        return self.with_own_tensors(report)

    def with_own_tensors(self, report: StoreReport) -> Ready:
        """The model, ready to stream from its own tensors."""
        make_source = module_source(self.name, self.config, report.reason, self.hardware)
        return Ready(model=self.model, inventory=self.inventory, make_source=make_source, report=report)


async def on_all_ranks(loaded: Loaded, ready: Ready) -> Ready:
    """``ready``, if every rank that gathers streams from its entry, or none does; else from the model's own tensors.

    :raises RanksDisagreeError: if the ranks have different weights.
    """
    ranks = loaded.hardware.ranks
    if ranks is None:
        return ready
    decision = await agreed_on_store(ranks, loaded.name, ready.report, uses_entry=ready.lease is not None)
    if decision is None or ready.lease is None:
        return ready
    async with open_threads() as crew:  # its tensors show the entry: they lie elsewhere than before
        inventory = await crew.call(lambda: take_again(loaded.model, loaded.inventory), name="inventory")
    moved = attrs.evolve(loaded, inventory=inventory)
    return moved.with_own_tensors(attrs.evolve(ready.report, reason=decision))


async def share_loaded(
    store: HostWeightStore,
    crew: ThreadCrew,
    stack: AsyncExitStack,
    loaded: Loaded,
    identity: SourceIdentity | None,
    progress: Progress | None = None,
) -> Ready:
    """The model, ready to stream from an entry with its weights: one that is there, or a new one. Where the store fails
    and may be done without, it streams from its own tensors, as loaded. ``stack`` closes the lease.

    :raises StoreError: if the store must be used and cannot, or if what it met is a mistake; its ``report`` says so.
    """
    source_id = None if identity is None else identity.source_id
    try:
        entry = await _find_or_publish(store, loaded, identity, progress)
        ownership, lease = entry.ownership, entry.lease
        held = HeldLease.of(lease, stack)
        report = _report(entry.outcome, lease, source_id, loaded.config)
        if not report.remapped:
            return loaded.with_own_tensors(report)
        check_restorable(ownership, lease)
        await crew.call(lambda: remap(loaded.inventory, ownership, lease), name="remapping")
    except StoreError as failure:
        return loaded.without_entry(failure, source_id)
    await crew.call(give_memory_back, name="giving memory back")
    return Ready(
        model=loaded.model,
        inventory=loaded.inventory,
        make_source=from_entry(ownership, held, loaded.config, report.reason, in_module=True),
        report=report,
        lease=lease,
        is_verified=entry.is_written,
    )


@attrs.frozen(eq=False)
class _Entry:
    """The entry of a model's weights. ``is_written``: just now, by this process, from bytes that it hashed."""

    ownership: Ownership
    outcome: StoreOutcome
    lease: Lease
    is_written: bool


async def _find_or_publish(
    store: HostWeightStore, loaded: Loaded, identity: SourceIdentity | None, progress: Progress | None
) -> _Entry:
    """The entry of the model's weights. A draft holds the model's memory, so it does not leave here."""
    ownership, draft = loaded.draft(None if identity is None else identity.inputs)
    content_id = source_id = None
    if identity is not None:
        source_id = identity.source_id
    else:  # look before writing: a model that was loaded already is mostly stored already
        content_id = await store.content_id(draft)
        lease = await _lease_if_sound(store, content_id, is_required=loaded.config.store_mode == "required")
        if lease is not None:
            return _Entry(ownership, StoreOutcome.LOCAL_HIT, lease, is_written=False)
    published, lease = await store.publish_leased(draft, source_id=source_id, content_id=content_id, progress=progress)
    is_hit = identity is None and published.was_present  # somebody else published the same meanwhile
    outcome = StoreOutcome.LOCAL_HIT if is_hit else StoreOutcome.PUBLISHED
    return _Entry(ownership, outcome, lease, is_written=not published.was_present)


async def _lease_if_sound(store: HostWeightStore, content_id: str, *, is_required: bool) -> Lease | None:
    try:
        lease = await store.lease(content_id)
    except EntryRejectedError:
        if is_required:
            raise
        return None  # it was put aside: to be published again
    if lease is None and is_required:
        raise EntryMissingError(content_id)
    return lease


def _report(outcome: StoreOutcome, lease: Lease, source_id: str | None, config: OffloadConfig) -> StoreReport:
    found = "its weights were published" if outcome is StoreOutcome.PUBLISHED else "its weights were stored already"
    use = "the model shows the entry" if config.remap_after_publish else "the model keeps copies of its own"
    return StoreReport(
        outcome=outcome,
        reason=f"{found}; {use}",
        source_id=source_id,
        content_id=lease.content_id,
        generation=lease.generation,
        remapped=config.remap_after_publish,
    )


def metadata_of(model: nn.Module, identity_inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What an entry says about itself for people; the list of tensors is in the manifest already."""
    inputs = {key: value for key, value in (identity_inputs or {}).items() if key not in ("tensors", "computed")}
    return {"model": f"{type(model).__module__}.{type(model).__qualname__}", "identity_inputs": inputs}
