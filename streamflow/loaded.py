"""`open_offload`: from a loaded module to one that streams, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from streamflow.config import OffloadConfig
from streamflow.hardware import Hardware, open_hardware
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.sharing import open_shared
from streamflow.interrupts import uninterrupted
from streamflow.opening import effective_config, open_module
from streamflow.pipelines.discovery import is_pipeline
from streamflow.pipelines.opening import open_pipeline
from streamflow.ranks.topology import RankGroups
from streamflow.runtime.offload import Offload
from streamflow.stages.devices.base import Device
from streamflow.warmup import WarmUp, warm_up

#: Why the weights of a model that was given to `open_offload` are taken from it.
LOADED_ALREADY = "the model was loaded already"


@asynccontextmanager
@uninterrupted
async def open_offload(
    model: Any,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    *,
    inputs: LoadInputs | None = None,
    warmup: WarmUp = None,
    ranks: RankGroups | DeviceMesh | None = None,
    device: Device | None = None,
) -> AsyncIterator[Offload]:
    """Streams ``model`` while the context is open; its outputs are byte-identical to those of the resident model.

    ``model`` must lie on the host, loaded. While it is attached its blocks' weights are in no fixed place: reading them
    gives poison, ``state_dict()`` gives the real bytes, and what would move or change them is refused. Leaving stops
    running requests at their next block boundary and leaves the model as it was: the same Parameter objects over the
    same values (in other host memory where images were page-locked).

    With the store on (``config.store_mode``), the model's tensors show the entry of their content from then on, a
    mapping that all processes share, and keep it after leaving; without an entry it is published first. ``inputs`` says
    what the store has to know of how the model was loaded.

    ``model`` may be a whole pipeline, too (of diffusers, or anything whose ``components`` are a mapping with modules in
    it): its transformers stream, its encoders and VAEs come to the device while they are used, within
    ``config.device_budget_bytes``, and an unmodified pipeline runs under `Offload.run`.

    ``warmup`` is a dummy request that is run before this returns: True for the one that the pipeline's class declares
    (else one step), a `WarmUpRecipe` or a mapping of one, or a function; None for none. Where ranks gather, none of
    them returns before all have done theirs.

    ``config`` may be a mapping of options; None is all defaults. ``ranks`` are the process groups, or a mesh, that this
    process belongs to: where several ranks have the same weights, each copies a slice of a block and they gather the
    rest, all of them opening and closing together. None: this process streams by itself. ``device`` replaces the
    backend that ``config.device`` names, for modelled hardware.

    :raises ConfigurationError: if options are not usable, before anything is touched.
    :raises PlanError: if no blocks are found; it lists what could be meant.
    :raises UnsupportedModelError: if the model is none, or holds tensors that cannot be re-pointed exactly.
    :raises AlreadyAttachedError: if the model, or a part of it, is attached already.
    :raises ComponentPolicyError: if ``config.components`` names what it cannot decide about.
    :raises DeviceBudgetError: if a component does not fit into the budget.
    :raises WarmUpError: if the warm-up fails.
    :raises RankGroupError, MeshDimensionError, TopologyMismatchError: if ``ranks`` is not usable.
    :raises RanksDisagreeError: if the ranks are configured differently, or have different sources.
    :raises WaveBudgetError: if requests of a rank could wait for each other's room within the budget.
    :raises RankError: if a rank does not come, fails, or is gone.
    :raises DeviceMemoryError: if window, residents and fixed tensors do not fit on the device.
    :raises HostMemoryError: if page-locked images do not fit on the host.
    :raises StoreError: if the store must be used and cannot, or found what must not be.
    """
    config = effective_config(config)
    inputs = inputs if inputs is not None else LoadInputs()
    async with (
        open_hardware(device, ranks, config) as (hardware, config),
        _opened(model, config, inputs, hardware) as offload,
    ):
        await hardware.open_together(partial(warm_up, offload, model, warmup, on_failure=config.warmup_failure))
        yield offload


def _opened(
    model: Any, config: OffloadConfig, inputs: LoadInputs, hardware: Hardware
) -> AbstractAsyncContextManager[Offload]:
    if is_pipeline(model):
        return open_pipeline(model, config, LOADED_ALREADY, inputs, hardware)
    if config.store_mode == "disabled":
        return open_module(model, config, LOADED_ALREADY, hardware)
    return open_shared(model, config, inputs, hardware)
