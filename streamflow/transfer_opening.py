"""Choosing the transfer of an offload's blocks, and opening it."""

from __future__ import annotations

from collections.abc import Sequence

from streamflow.component_parts import BoundComponent
from streamflow.config import OffloadConfig
from streamflow.ranks.joint_engine import JointEngine
from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.images import BlockImage
from streamflow.stages.opening import OpenTransfer
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.transfers.direct import DirectTransfer
from streamflow.stages.transfers.gathered import StagingOptions, open_gathered
from streamflow.stages.transfers.staged import open_staged
from streamflow.trace.engine import EngineTrace
from streamflow.transfer_choice import SourceCandidate, TransferChoice, choose


def choose_transfer_for(config: OffloadConfig, device: Device, components: Sequence[BoundComponent]) -> TransferChoice:
    """The transfer of all blocks; a pipeline's components all have sources of one kind."""
    sources = [component.source for component in components]
    first = next((source for source in sources if source.images), sources[0])
    why_not_direct = next((source.why_not_direct for source in sources if source.why_not_direct), None)
    why_not_registered = next((s.registration.problem for s in sources if s.registration.problem), None)
    candidate = SourceCandidate(first.name, first.reason, why_not_direct=why_not_direct)
    return choose([candidate], config, device_is_host=device.is_host, why_not_registered=why_not_registered)


def transfer_opener(
    choice: TransferChoice,
    images: Sequence[BlockImage],
    config: OffloadConfig,
    trace: EngineTrace,
    joint: JointEngine | None,
) -> OpenTransfer:
    """Opens the transfer that was chosen, for blocks of these images; with ``joint``, of slices of them."""

    async def open_transfer(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        if joint is not None:
            num_threads, chunk_bytes = config.effective_packing_threads, config.staging_chunk_bytes
            packing = StagingOptions(num_threads, chunk_bytes, trace.packed_listener)
            return await open_gathered(
                device,
                stream,
                crew,
                images,
                joint.ranks.communicator,
                chunk_bytes=config.ranks.gather_chunk_bytes,
                staged=None if choice.transfer == "direct" else packing,
                local=joint.local,
            )
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
