"""`open_streamed`: from a checkpoint to a model that streams, without ever holding its weights."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from streamflow.binding.blocks import BoundBlock
from streamflow.binding.guards import claimed
from streamflow.binding.inventory import Inventory
from streamflow.config import OffloadConfig
from streamflow.hardware import open_hardware
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.streaming import open_through_store
from streamflow.interrupts import uninterrupted
from streamflow.model_request import ModelRequest
from streamflow.opening import effective_config, inventory_of, open_module, open_with_source
from streamflow.ranks.topology import RankGroups
from streamflow.runtime.offload import Offload
from streamflow.stages.devices.base import Device
from streamflow.stages.threads import ThreadCrew, open_tasks, open_threads
from streamflow.store.reports import StoreReport
from streamflow.weights.adapters import CheckpointAdapter
from streamflow.weights.checkpoint import Checkpoint, open_checkpoint
from streamflow.weights.checkpoint_plan import CheckpointPlan
from streamflow.weights.registering import probe_ahead
from streamflow.weights.skeleton import lend_placeholders
from streamflow.weights.source import CheckpointSource, WeightSource


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
    inputs: LoadInputs | None = None,
    ranks: RankGroups | DeviceMesh | None = None,
    device: Device | None = None,
) -> AsyncIterator[Streamed]:
    """Streams the model that ``build`` returns straight from the files of ``checkpoint_dir``.

    ``build`` makes the module as if to load it, with the dtypes that its weights are to have; it is called in a thread,
    where uninitialised tensors go to the meta device, so the weights never come to be. Blocks are read from the files
    whenever they are fetched; the rest is brought to the device once. The files must stay as they are.

    Where the checkpoint cannot be streamed as it lies (``offload.statistics().choice`` has the code and the reason),
    ``load(skeleton)`` loads and returns the model the ordinary way; None reads it and converts to the model's dtypes.
    ``finalize(model)`` runs once the model is complete and before it is attached; None is ``model.eval()``. It may meet
    a model without values and must come to the same structure. ``adapters`` stand for custom loading steps. After
    leaving, a model that streamed from files is a skeleton again.

    With the store on (``config.store_mode``), the final weights are taken from its entry, and neither ``load`` nor the
    files' weights are touched; ``inputs`` declares what else decides them. ``build`` may be called again.

    :raises CheckpointNotFoundError, CheckpointAmbiguousError, CheckpointFormatError: if there is no sound checkpoint.
    :raises CheckpointUnusableError: if it can neither be streamed nor loaded.
    :raises SourceReadError: if a file cannot be read.
    :raises StoreError: if the store must be used and cannot, or found what must not be.

    All that `open_offload` raises, too.
    """
    async with open_hardware(device, ranks, effective_config(config)) as (hardware, config):
        request = ModelRequest(
            build=build,
            checkpoint_dir=checkpoint_dir,
            config=config,
            load=load,
            finalize=finalize,
            adapters=tuple(adapters),
            inputs=inputs if inputs is not None else LoadInputs(),
            hardware=hardware,
        )
        opened = _open_without_store(request) if config.store_mode == "disabled" else _open_with_store(request)
        async with opened as streamed:
            await hardware.open_together()
            yield streamed


@asynccontextmanager
async def _open_with_store(request: ModelRequest) -> AsyncIterator[Streamed]:
    async with open_through_store(request) as answer:
        if isinstance(answer, StoreReport):  # it could not serve: on as if there were none
            async with _open_without_store(request, answer) as streamed:
                yield streamed
        else:
            yield Streamed(*answer)


@asynccontextmanager
async def _open_without_store(request: ModelRequest, report: StoreReport | None = None) -> AsyncIterator[Streamed]:
    async with open_threads() as crew, AsyncExitStack() as stack:
        checkpoint = await crew.call(
            lambda: open_checkpoint(request.checkpoint_dir), undo=Checkpoint.close, name="opening"
        )
        closing = ExitStack()  # until a source takes the checkpoint over
        closing.callback(checkpoint.close)
        stack.push_async_callback(crew.call_through, closing.close)
        async with open_tasks() as beside:  # a second or two, like building
            beside.start_soon(_probe, checkpoint, request, crew, name="probe")
            built = await crew.call(request.build_skeleton, name="building")
            skeleton, answer = await crew.call(lambda: request.finished_skeleton(built, checkpoint), name="preflight")
        model = skeleton
        if isinstance(answer, CheckpointPlan):
            opened = _open_from_files(model, checkpoint, closing, answer, request, report)
        else:
            model = await crew.call(lambda: request.load_finished(skeleton, checkpoint, answer), name="loading")
            opened = open_module(model, request.config, f"{answer.code}: {answer.reason}", request.hardware, report)
        yield Streamed(await stack.enter_async_context(opened), model)


async def _probe(checkpoint: Checkpoint, request: ModelRequest, crew: ThreadCrew) -> None:
    paths = [file.path for file in checkpoint.files]
    await probe_ahead(paths, request.config, request.hardware.device, crew)


@asynccontextmanager
async def _open_from_files(
    model: nn.Module,
    checkpoint: Checkpoint,
    closing: ExitStack,
    plan: CheckpointPlan,
    request: ModelRequest,
    report: StoreReport | None,
) -> AsyncIterator[Offload]:
    def make_source(inventory: Inventory, blocks: tuple[BoundBlock, ...], backend: Device) -> WeightSource:
        source = CheckpointSource(inventory, blocks, checkpoint, plan, config)
        closing.pop_all()  # the source closes it, and knows when it must not be closed yet
        return source

    config, hardware = request.config, request.hardware
    with claimed(model, type(model).__name__):
        inventory = inventory_of(model, config)
        with lend_placeholders(model) as lent:
            opened = open_with_source(model, inventory.with_tensors(lent), config, make_source, hardware, report)
            async with opened as offload:
                yield offload
