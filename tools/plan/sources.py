"""The sources that a component's blocks could stream from, what each would take, and which one would be chosen."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from streamflow.config import OffloadConfig
from streamflow.errors import ConfigurationError
from streamflow.stages.transfers.chunks import largest_chunk
from streamflow.stages.transfers.staged import BUFFERS_PER_THREAD
from streamflow.tools.plan.values import SourcePlan
from streamflow.transfer_choice import choose_transfer
from streamflow.weights.checkpoint_plan import CheckpointFallback
from streamflow.weights.preflight import preflight

CHECKPOINT, MODULE = "checkpoint", "module"


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


def choose_source(sources: Sequence[SourcePlan]) -> tuple[SourcePlan | None, str]:
    """The first source that nothing stands against, and why it is this one; None if there is none."""
    against = [f"no {source.name}: {source.problem}" for source in sources if source.problem is not None]
    chosen = next((source for source in sources if source.problem is None), None)
    if chosen is None:
        return None, "; ".join(against) or "there are no blocks"
    if chosen.name == CHECKPOINT:
        return (
            chosen,
            "open_streamed reads blocks straight from the files, if the model proves to need exactly their tensors",
        )
    return chosen, "; ".join(against)


def _plan_checkpoint(sizes: ComponentSizes, config: OffloadConfig, device_is_host: bool) -> SourcePlan:
    answer = preflight((), {}, (), config.topology)
    transfer, reason = _transfer(CHECKPOINT, config, device_is_host, page_locked=False)
    fallback = f"{answer.code}: {answer.reason}" if isinstance(answer, CheckpointFallback) else None
    return SourcePlan(
        name=CHECKPOINT,
        problem=fallback or (reason if transfer is None else None),
        weight_host_bytes=0,
        page_locked_bytes=0,
        staging_bytes=_staging_bytes(sizes, config) if transfer == "staged" else 0,
        fixed_bytes=sizes.fixed_image_bytes,
        transfer=transfer,
        transfer_reason=reason,
    )


def _plan_module(sizes: ComponentSizes, config: OffloadConfig, device_is_host: bool) -> SourcePlan:
    pinned = config.pin_host_memory and config.transfer != "staged" and not device_is_host
    transfer, reason = _transfer(MODULE, config, device_is_host, page_locked=pinned)
    images = sum(sizes.image_bytes)
    return SourcePlan(
        name=MODULE,
        problem=reason if transfer is None else None,
        weight_host_bytes=sizes.fixed_weight_bytes + (images if pinned else sizes.block_weight_bytes),
        page_locked_bytes=images if pinned else 0,
        staging_bytes=_staging_bytes(sizes, config) if transfer == "staged" else 0,
        fixed_bytes=0 if device_is_host else sizes.fixed_image_bytes,
        transfer=transfer,
        transfer_reason=reason,
    )


def _transfer(source: str, config: OffloadConfig, device_is_host: bool, *, page_locked: bool) -> tuple[str | None, str]:
    """The transfer that would be chosen (None if there is none) and why."""
    why_not_locked = f"the {source} source is pageable memory (pin_host_memory={config.pin_host_memory})"
    try:
        chosen = choose_transfer(
            config.transfer, device_is_host=device_is_host, page_locked=page_locked, why_not_locked=why_not_locked
        )
    except ConfigurationError as refusal:
        return None, "; ".join(refusal.problems)
    return chosen.name, chosen.reason


def _staging_bytes(sizes: ComponentSizes, config: OffloadConfig) -> int:
    images = [[_Image(nbytes)] for nbytes in sizes.image_bytes]
    return largest_chunk(images, config.staging_chunk_bytes) * config.effective_packing_threads * BUFFERS_PER_THREAD
