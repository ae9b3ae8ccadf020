"""Sharing the weights of a loaded pipeline: an entry for each component, found or published by its content."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import attrs
from torch import nn

from streamflow.binding.inventory import Inventory
from streamflow.config import OffloadConfig
from streamflow.hardware import Hardware
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.ready import Ready
from streamflow.host_weights.sharing import Loaded, on_all_ranks, share_loaded
from streamflow.stages.threads import open_threads
from streamflow.store.errors import StoreError
from streamflow.store.reports import StoreOutcome, StoreReport
from streamflow.store.store import HostWeightStore, open_store


@attrs.frozen(eq=False)
class SharedComponents:
    """Claimed components by name, each ready to stream or to move; ``store`` None: it could not be opened."""

    ready: Mapping[str, Ready]
    store: HostWeightStore | None

    @property
    def report(self) -> StoreReport:
        """What the store did for all of them: of components that fared differently, the one that fared worst."""
        order = list(StoreOutcome)
        return max((ready.report for ready in self.ready.values()), key=lambda report: order.index(report.outcome))


@asynccontextmanager
async def open_shared_components(
    modules: Mapping[str, nn.Module],
    inventories: Mapping[str, Inventory],
    config: OffloadConfig,
    inputs: LoadInputs,
    hardware: Hardware,
) -> AsyncIterator[SharedComponents]:
    """The components of a pipeline, each with the entry of its weights where it can have one. Their tensors show the
    entries from then on.

    A component that shares memory with another one keeps its own tensors, as does one that cannot be stored.

    :raises StoreError: if the store must be used and cannot; its ``report`` says so.
    """
    loaded = {
        name: Loaded(name, module, inventories[name], config, _with_neighbours(inputs, name, modules), hardware)
        for name, module in modules.items()
    }
    async with open_threads() as crew, AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(open_store(config.store, crew))
        except StoreError as failure:
            ready = {name: await on_all_ranks(one, one.without_entry(failure, None)) for name, one in loaded.items()}
            yield SharedComponents(ready, None)
            return
        ready = {
            name: await on_all_ranks(one, await share_loaded(store, crew, stack, one, None))
            for name, one in loaded.items()
        }
        yield SharedComponents(ready, store)


def _with_neighbours(inputs: LoadInputs, name: str, modules: Mapping[str, nn.Module]) -> LoadInputs:
    others = (module for other, module in modules.items() if other != name)
    return attrs.evolve(inputs, neighbours=(*inputs.neighbours, *others))
