"""`open_streamed` through the store: a hit loads nothing, a miss produces the entry once for everybody."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import attrs
from torch import nn

from streamflow.binding.guards import claimed
from streamflow.binding.inventory import Inventory
from streamflow.host_weights.errors import EntryMissingError, UndeclaredProducerError, report_or_raise
from streamflow.host_weights.identity import SourceIdentity, source_identity
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.ownership import Ownership, ownership_of
from streamflow.host_weights.producer import draft_of_checkpoint
from streamflow.host_weights.ready import HeldLease, Ready, from_entry, open_ready
from streamflow.host_weights.restorer import check_restorable
from streamflow.host_weights.sharing import Loaded, metadata_of, share_loaded
from streamflow.host_weights.support import check_not_quantized, check_topology
from streamflow.model_request import ModelRequest
from streamflow.opening import inventory_of
from streamflow.ranks.joint_store import agreed_on_store
from streamflow.runtime.offload import Offload
from streamflow.stages.threads import ThreadCrew, open_tasks, open_threads
from streamflow.store.errors import EntryRejectedError, StoreError, disk_errors
from streamflow.store.hashing import Progress
from streamflow.store.paths import StorePaths
from streamflow.store.reports import StoreOutcome, StoreReport
from streamflow.store.store import HostWeightStore, open_store
from streamflow.transfer_choice import SourceCandidate, choose_source, why_not_registered_by_options
from streamflow.weights.checkpoint import Checkpoint, open_checkpoint
from streamflow.weights.checkpoint_plan import CheckpointFallback, CheckpointPlan
from streamflow.weights.registering import probe_ahead

#: What streamflow itself does to a checkpoint's weights; to be changed with it.
PRODUCER = "streamflow checkpoint 1"


@asynccontextmanager
async def open_through_store(request: ModelRequest) -> AsyncIterator[tuple[Offload, nn.Module] | StoreReport]:
    """The open offload and its model; or, where the store cannot serve and may be done without, why it could not.

    :raises StoreError: if the store must be used and cannot, or if what it met is a mistake; its ``report`` says so.
    """
    async with open_threads() as crew:
        async with AsyncExitStack() as stack:
            opening = _Opening(request, crew, stack)
            ready = await _on_all_ranks(request, await _or_report(opening))
            if isinstance(ready, Ready):
                opened = open_ready(ready, request.config, request.hardware, opening.store)
                yield await stack.enter_async_context(opened), ready.model
                return
        yield ready


async def publish_through_store(request: ModelRequest, progress: Progress | None = None) -> StoreReport:
    """What opening the model through the store would do, up to where it streams: afterwards the entry is there.

    ``progress`` is told done and total bytes while an entry is written.

    :raises StoreError: if the store fails.
    """
    async with open_threads() as crew, AsyncExitStack() as stack:
        ready = await _or_report(_Opening(request, crew, stack, progress))
    return ready.report if isinstance(ready, Ready) else ready


async def _on_all_ranks(request: ModelRequest, ready: Ready | StoreReport) -> Ready | StoreReport:
    """``ready``, if every rank that gathers streams from its entry, or none does; else why this one does not, either.

    :raises RanksDisagreeError: if the ranks have different weights.
    """
    ranks = request.hardware.ranks
    if ranks is None:
        return ready
    report = ready.report if isinstance(ready, Ready) else ready
    uses_entry = isinstance(ready, Ready) and ready.lease is not None
    reason = await agreed_on_store(ranks, "the model", report, uses_entry=uses_entry)
    if reason is None or not uses_entry:
        return ready
    return attrs.evolve(report, outcome=StoreOutcome.CANONICAL_FALLBACK, reason=reason)


async def _or_report(opening: _Opening) -> Ready | StoreReport:
    try:
        return await opening.prepare()
    except StoreError as failure:
        return report_or_raise(failure, opening.source_id, is_required=opening.is_required)


class _Opening:
    """One opening through the store; what it opens, ``stack`` closes."""

    def __init__(
        self, request: ModelRequest, crew: ThreadCrew, stack: AsyncExitStack, progress: Progress | None = None
    ) -> None:
        self.store: HostWeightStore
        self.source_id: str | None = None
        self.is_required = request.config.store_mode == "required"
        self._request = request
        self._crew = crew
        self._stack = stack
        self._progress = progress

    async def prepare(self) -> Ready | StoreReport:
        """A model that is ready to stream; or the report of why it is better opened without an entry."""
        request, crew = self._request, self._crew
        _check_declared(request)
        check_topology(request.config.topology, request.inputs)
        self.store = await self._stack.enter_async_context(open_store(request.config.store, crew))
        async with open_tasks() as beside:  # it takes a second or two, like building
            beside.start_soon(self._probe, name="probe")
            skeleton = await crew.call(request.build_skeleton, name="building")
        check_not_quantized(skeleton)
        checkpoint = await crew.call(
            lambda: open_checkpoint(request.checkpoint_dir), undo=Checkpoint.close, name="opening"
        )
        self._stack.push_async_callback(crew.call_through, checkpoint.close)
        identity = await self._identify(skeleton, checkpoint)
        self.source_id = identity.source_id
        held = await self._find(identity.source_id)
        if held is None and self.is_required:
            raise EntryMissingError(identity.source_id)
        if held is None:
            async with self.store.publication_lock(identity.source_id):
                held = await self._find(identity.source_id)  # others may have published while we waited
                if held is None:
                    return await self._produce(skeleton, checkpoint, identity)
        return await self._restore(skeleton, held)

    async def _probe(self) -> None:
        request = self._request
        on_its_disk = StorePaths(request.config.store.root).format_file
        await probe_ahead([on_its_disk], request.config, request.hardware.device, self._crew)

    async def _identify(self, skeleton: nn.Module, checkpoint: Checkpoint) -> SourceIdentity:
        request, config = self._request, self._request.config
        found = await self._crew.call(lambda: _files_of(checkpoint, request.inputs), name="identity")
        opened = {file.path: file.status for file in checkpoint.files}  # what will be read, whatever has the path then
        paths = dict.fromkeys(path for _, path in found)
        digests = {path: await self.store.source_digest(path, opened.get(path)) for path in paths}
        named = [(role, digests[path]) for role, path in found]

        def identify() -> SourceIdentity:
            return source_identity(
                skeleton,
                named,
                config.topology,
                config.plan,
                request.adapters,
                request.inputs,
                PRODUCER,
                replaced=request.replaced(skeleton),
            )

        return await self._crew.call(identify, name="identity")

    async def _find(self, source_id: str) -> HeldLease | None:
        """The entry of the source, proven as far as the options ask; None if there is none any more.

        :raises EntryRejectedError: if it is damaged and must be used.
        """
        content_id = await self.store.content_of(source_id)
        if content_id is None:
            return None
        try:
            lease = await self.store.lease(content_id)
        except EntryRejectedError:
            if self.is_required:
                raise
            return None  # it was put aside: to be made again
        return None if lease is None else HeldLease.of(lease, self._stack)

    async def _restore(self, skeleton: nn.Module, held: HeldLease) -> Ready:
        """The finished skeleton, proven to need exactly what the entry holds."""
        await self._crew.call(lambda: self._request.finish(skeleton), name="finalising")
        inventory = await self._claim(skeleton)
        ownership = ownership_of(skeleton, inventory)
        check_restorable(ownership, held.lease)
        return self._from_entry(skeleton, inventory, ownership, held, StoreOutcome.LOCAL_HIT, is_verified=False)

    async def _claim(self, model: nn.Module) -> Inventory:
        """Claim the finished model, and see what it consists of."""
        self._stack.enter_context(claimed(model, type(model).__name__))
        return await self._crew.call(lambda: inventory_of(model, self._request.config), name="inventory")

    def _from_entry(
        self,
        skeleton: nn.Module,
        inventory: Inventory,
        ownership: Ownership,
        held: HeldLease,
        outcome: StoreOutcome,
        *,
        is_verified: bool,
    ) -> Ready:
        reason = {
            StoreOutcome.LOCAL_HIT: "the store has the final weights",
            StoreOutcome.PUBLISHED: "the final weights were published straight from the files",
        }[outcome]
        lease = held.lease
        report = StoreReport(outcome, reason, None, self.source_id, lease.content_id, lease.generation)
        return Ready(
            model=skeleton,
            inventory=inventory,
            make_source=from_entry(ownership, held, self._request.config, reason, in_module=False),
            report=report,
            lease=lease,
            is_verified=is_verified,
            is_skeleton=True,
        )

    def _why_the_checkpoint(self) -> str | None:
        """Why blocks are better read from the checkpoint's own files than from an entry yet to be made; None: no."""
        config = self._request.config
        if self._request.hardware.device.is_host:
            return None
        why_not = why_not_registered_by_options(config, device_is_host=False)
        candidates = [SourceCandidate("artifact"), SourceCandidate("checkpoint")]
        chosen, _ = choose_source(candidates, why_not_registered=why_not)
        if chosen is None or chosen.name == "artifact":
            return None
        return f"files are not registered ({why_not}), so the checkpoint streams as well as an entry would"

    async def _produce(
        self, skeleton: nn.Module, checkpoint: Checkpoint, identity: SourceIdentity
    ) -> Ready | StoreReport:
        finished, answer = await self._crew.call(
            lambda: self._request.finished_skeleton(skeleton, checkpoint), name="preflight"
        )
        if isinstance(answer, CheckpointPlan):
            reason = self._why_the_checkpoint()
            if reason is not None:
                return StoreReport(StoreOutcome.CANONICAL_FALLBACK, reason, None, self.source_id)
            return await self._produce_from_files(finished, checkpoint, answer, identity)
        return await self._produce_by_loading(finished, checkpoint, answer, identity)

    async def _produce_from_files(
        self, skeleton: nn.Module, checkpoint: Checkpoint, plan: CheckpointPlan, identity: SourceIdentity
    ) -> Ready:
        """Nothing is loaded: the files hold what the model needs, and are copied into the layout that it needs."""
        inventory = await self._claim(skeleton)
        ownership = ownership_of(skeleton, inventory)
        metadata = metadata_of(skeleton, identity.inputs)
        draft = draft_of_checkpoint(ownership, inventory, checkpoint, plan, metadata)
        published, lease = await self.store.publish_leased(draft, source_id=identity.source_id, progress=self._progress)
        held = HeldLease.of(lease, self._stack)
        outcome, is_verified = StoreOutcome.PUBLISHED, not published.was_present
        return self._from_entry(skeleton, inventory, ownership, held, outcome, is_verified=is_verified)

    async def _produce_by_loading(
        self, skeleton: nn.Module, checkpoint: Checkpoint, fallback: CheckpointFallback, identity: SourceIdentity
    ) -> Ready:
        request = self._request
        model = await self._crew.call(lambda: request.load_finished(skeleton, checkpoint, fallback), name="loading")
        loaded = Loaded(
            type(model).__name__, model, await self._claim(model), request.config, request.inputs, request.hardware
        )
        return await share_loaded(self.store, self._crew, self._stack, loaded, identity, self._progress)


def _check_declared(request: ModelRequest) -> None:
    if request.inputs.producer_abi is None and request.custom_code:
        raise UndeclaredProducerError(request.custom_code)


def _files_of(checkpoint: Checkpoint, inputs: LoadInputs) -> list[tuple[str, str]]:
    """What each file that decides the weights is to loading, and its path. Blocks."""
    folder = os.path.dirname(checkpoint.path)
    paths = dict.fromkeys((*(file.path for file in checkpoint.files), checkpoint.path))
    own = [(f"checkpoint/{os.path.relpath(path, folder)}", path) for path in paths]
    with disk_errors("looking for source files", checkpoint.path):
        return [*own, *inputs.files()]
