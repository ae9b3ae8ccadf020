"""`open_streamed`: from a checkpoint to a model that streams, without ever holding its weights."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from torch import nn

from streamflow.binding.blocks import BoundBlock
from streamflow.binding.guards import claimed
from streamflow.binding.inventory import Inventory
from streamflow.config import OffloadConfig
from streamflow.errors import CheckpointUnusableError
from streamflow.interrupts import uninterrupted
from streamflow.opening import effective_config, inventory_of, open_module, open_with_source
from streamflow.runtime.offload import Offload
from streamflow.stages.devices.base import Device
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.weights.adapters import CheckpointAdapter
from streamflow.weights.checkpoint import Checkpoint, open_checkpoint
from streamflow.weights.checkpoint_plan import CheckpointFallback, CheckpointPlan, FallbackCode
from streamflow.weights.needed import needed_tensors, never_computed
from streamflow.weights.ordinary_loading import load_ordinarily
from streamflow.weights.preflight import preflight
from streamflow.weights.skeleton import build_skeleton, lend_placeholders
from streamflow.weights.source import CheckpointSource, WeightSource
from streamflow.weights.source_matching import some


class Streamed(NamedTuple):
    """An open offload and the model that it streams."""

    offload: Offload
    model: nn.Module


@asynccontextmanager
@uninterrupted
async def open_streamed(
    build: Callable[[], nn.Module],
    checkpoint_dir: str | os.PathLike[str],
    config: OffloadConfig | Mapping[str, Any] | None = None,
    *,
    load: Callable[[nn.Module], nn.Module] | None = None,
    finalize: Callable[[nn.Module], object] | None = None,
    adapters: Iterable[CheckpointAdapter] = (),
    device: Device | None = None,
) -> AsyncIterator[Streamed]:
    """Streams the model that ``build`` returns straight from the files of ``checkpoint_dir``.

    ``build`` makes the module as if to load it, with the dtypes that its weights are to have; it is called in a thread,
    where uninitialised tensors go to the meta device, so the weights never come to be. Blocks are read from the files
    whenever they are fetched; the rest is brought to the device once. The files must stay as they are.

    Where the checkpoint cannot be streamed as it lies (``offload.statistics().choice`` has the code and the reason),
    ``load(skeleton)`` loads and returns the model the ordinary way; None reads it and converts to the model's dtypes.
    ``finalize(model)`` runs once the model is complete and before it is attached; None is ``model.eval()``.
    ``adapters`` stand for custom loading steps. After leaving, a model that streamed from files is a skeleton again.

    :raises CheckpointNotFoundError, CheckpointAmbiguousError, CheckpointFormatError: if there is no sound checkpoint.
    :raises CheckpointUnusableError: if it can neither be streamed nor loaded.
    :raises SourceReadError: if a file cannot be read.

    All that `open_offload` raises, too.
    """
    config = effective_config(config)
    adapters = tuple(adapters)
    async with open_threads() as crew, AsyncExitStack() as stack:
        model = await crew.call(lambda: build_skeleton(build), name="building")
        checkpoint = await crew.call(lambda: open_checkpoint(checkpoint_dir), undo=Checkpoint.close, name="opening")
        stack.push_async_callback(crew.call_through, checkpoint.close)
        answer = await crew.call(lambda: _examine(model, checkpoint, adapters, config), name="preflight")
        if isinstance(answer, CheckpointPlan):
            opened = _open_from_files(model, checkpoint, answer, config, finalize, device)
        else:
            model = await _load(model, checkpoint, answer, load, bool(adapters), crew)
            opened = _open_loaded(model, answer, config, finalize, device)
        yield Streamed(await stack.enter_async_context(opened), model)


def _examine(
    skeleton: nn.Module, checkpoint: Checkpoint, adapters: tuple[CheckpointAdapter, ...], config: OffloadConfig
) -> CheckpointPlan | CheckpointFallback:
    """A plan only where the files and the skeleton together hold every value of the model."""
    needed = needed_tensors(skeleton)
    answer = preflight(needed, checkpoint.entries, adapters, config.topology, same_bytes=checkpoint.same_bytes)
    problems = tuple(never_computed(skeleton))
    if isinstance(answer, CheckpointPlan) and problems:
        return CheckpointFallback(FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE, some(problems, "; "), problems)
    return answer


@asynccontextmanager
async def _open_from_files(
    model: nn.Module,
    checkpoint: Checkpoint,
    plan: CheckpointPlan,
    config: OffloadConfig,
    finalize: Callable[[nn.Module], object] | None,
    device: Device | None,
) -> AsyncIterator[Offload]:
    (finalize or nn.Module.eval)(model)

    def make_source(inventory: Inventory, blocks: tuple[BoundBlock, ...], backend: Device) -> WeightSource:
        return CheckpointSource(inventory, blocks, checkpoint, plan)

    with claimed(model, type(model).__name__):
        inventory = inventory_of(model, config)
        with lend_placeholders(model) as lent:
            async with open_with_source(model, inventory.with_tensors(lent), config, make_source, device) as offload:
                yield offload


@asynccontextmanager
async def _open_loaded(
    model: nn.Module,
    fallback: CheckpointFallback,
    config: OffloadConfig,
    finalize: Callable[[nn.Module], object] | None,
    device: Device | None,
) -> AsyncIterator[Offload]:
    (finalize or nn.Module.eval)(model)
    async with open_module(model, config, f"{fallback.code}: {fallback.reason}", device) as offload:
        yield offload


async def _load(
    skeleton: nn.Module,
    checkpoint: Checkpoint,
    fallback: CheckpointFallback,
    load: Callable[[nn.Module], nn.Module] | None,
    has_adapters: bool,
    crew: ThreadCrew,
) -> nn.Module:
    if load is not None:
        chosen = load
        return await crew.call(lambda: chosen(skeleton), name="loading")
    if has_adapters or fallback.code != FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE:
        problem = "its ordinary loading needs steps that streamflow does not know; pass load="
        raise CheckpointUnusableError(checkpoint.path, fallback.code, fallback.reason, problem)
    return await crew.call(lambda: load_ordinarily(skeleton, checkpoint, fallback), name="loading")
