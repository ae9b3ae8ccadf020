"""The sources that a component's blocks could stream from, what each would take, and which one would be chosen."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from streamflow.config import OffloadConfig
from streamflow.errors import ConfigurationError
from streamflow.stages.transfers.chunks import largest_chunk
from streamflow.stages.transfers.staged import BUFFERS_PER_THREAD
from streamflow.tools.plan.values import SourcePlan
from streamflow.transfer_choice import (
    SourceCandidate,
    SourceName,
    choose_source,
    choose_transfer,
    why_not_page_locked,
    why_not_registered_by_options,
    why_too_much,
)
from streamflow.weights.checkpoint_plan import CheckpointFallback
from streamflow.weights.preflight import preflight

CHECKPOINT: SourceName = "checkpoint"
MODULE: SourceName = "module"

_REASONS = {
    CHECKPOINT: "open_streamed reads blocks straight from the files, if the model proves to need exactly their tensors"
}


@attrs.frozen
class ComponentSizes:
    """Bytes of every block image, and of the tensors in blocks and outside (``fixed``): as stored, and as laid out."""

    image_bytes: tuple[int, ...]
    block_weight_bytes: int
    fixed_weight_bytes: int
    fixed_image_bytes: int


@attrs.frozen
class _Image:
    """A block image as one piece."""

    nbytes: int
    offset_bytes: int = 0
    splittable: bool = True


def plan_sources(sizes: ComponentSizes, config: OffloadConfig, device_is_host: bool) -> tuple[SourcePlan, ...]:
    """What each source would take, the preferred one first."""
    return _plan_checkpoint(sizes, config, device_is_host), _plan_module(sizes, config, device_is_host)


def choose_planned(
    sources: Sequence[SourcePlan], config: OffloadConfig, device_is_host: bool
) -> tuple[str | None, str]:
    """The source that would be chosen, and why it is this one; None if there is none."""
    candidates = [SourceCandidate(source.name, _REASONS.get(source.name, ""), source.problem) for source in sources]
    why_not = why_not_registered_by_options(config, device_is_host=device_is_host)
    chosen, reason = choose_source(candidates, why_not_registered=why_not)
    return None if chosen is None else chosen.name, reason


def _plan_checkpoint(sizes: ComponentSizes, config: OffloadConfig, device_is_host: bool) -> SourcePlan:
    answer = preflight((), {}, (), config.topology)
    why_not = why_not_registered_by_options(config, device_is_host=device_is_host) or why_too_much(
        sizes.block_weight_bytes, limit_bytes=config.host_registration_limit_bytes, available_bytes=None
    )
    transfer, reason = _transfer(CHECKPOINT, config, device_is_host, why_not)
    fallback = f"{answer.code}: {answer.reason}" if isinstance(answer, CheckpointFallback) else None
    return SourcePlan(
        name=CHECKPOINT,
        problem=fallback or (reason if transfer is None else None),
        weight_host_bytes=0,
        page_locked_bytes=0,
        registered_bytes=sizes.block_weight_bytes if transfer == "direct" and not device_is_host else 0,
        staging_bytes=_staging_bytes(sizes, config) if transfer == "staged" else 0,
        fixed_bytes=sizes.fixed_image_bytes,
        transfer=transfer,
        transfer_reason=reason,
    )


def _plan_module(sizes: ComponentSizes, config: OffloadConfig, device_is_host: bool) -> SourcePlan:
    pinned = why_not_page_locked(config, device_is_host=device_is_host) is None
    transfer, reason = _transfer(MODULE, config, device_is_host, None)
    images = sum(sizes.image_bytes)
    return SourcePlan(
        name=MODULE,
        problem=reason if transfer is None else None,
        weight_host_bytes=sizes.fixed_weight_bytes + (images if pinned else sizes.block_weight_bytes),
        page_locked_bytes=images if pinned else 0,
        registered_bytes=0,
        staging_bytes=_staging_bytes(sizes, config) if transfer == "staged" else 0,
        fixed_bytes=0 if device_is_host else sizes.fixed_image_bytes,
        transfer=transfer,
        transfer_reason=reason,
    )


def _transfer(
    source: SourceName, config: OffloadConfig, device_is_host: bool, why_not_registered: str | None
) -> tuple[str | None, str]:
    """The transfer that would be chosen (None if there is none) and why."""
    try:
        return choose_transfer(
            SourceCandidate(source), config, device_is_host=device_is_host, why_not_registered=why_not_registered
        )
    except ConfigurationError as refusal:
        return None, "; ".join(refusal.problems)


def _staging_bytes(sizes: ComponentSizes, config: OffloadConfig) -> int:
    images = [[_Image(nbytes)] for nbytes in sizes.image_bytes]
    return largest_chunk(images, config.staging_chunk_bytes) * config.effective_packing_threads * BUFFERS_PER_THREAD
