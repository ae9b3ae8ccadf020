"""What the components of a loaded pipeline stream from: their own tensors, or entries of the host weight store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import attrs

from streamflow.binding.inventory import Inventory
from streamflow.component_parts import MakeSource
from streamflow.config import OffloadConfig
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.ready import Ready, verified_meanwhile
from streamflow.host_weights.sharing import Loaded, share_loaded
from streamflow.opening import module_source
from streamflow.pipelines.discovery import Component
from streamflow.runtime.offload import Offload
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.store.errors import StoreError
from streamflow.store.reports import StoreReport
from streamflow.store.store import HostWeightStore, open_store


@attrs.frozen(eq=False)
class PipelineSources:
    """How each component's source is made, by the component's name; ``ready``: those that the store was asked for."""

    config: OffloadConfig
    make_sources: Mapping[str, MakeSource]
    ready: Mapping[str, Ready] = attrs.field(factory=dict)
    store: HostWeightStore | None = None

    def report_on(self, component: str) -> StoreReport | None:
        """What the store did for the component; None: it was not asked."""
        return self.ready[component].report if component in self.ready else None

    @asynccontextmanager
    async def verified_meanwhile(self, offload: Offload) -> AsyncIterator[None]:
        """Verify the entries, as the configuration says, while this is open."""
        async with AsyncExitStack() as stack:
            for ready in self.ready.values():
                await stack.enter_async_context(verified_meanwhile(ready, self.config, self.store, offload))
            yield


@asynccontextmanager
async def open_sources(
    components: Sequence[Component],
    inventories: Mapping[str, Inventory],
    config: OffloadConfig,
    inputs: LoadInputs,
    reason: str,
) -> AsyncIterator[PipelineSources]:
    """The sources of claimed components, each in the store by its own content where the store is on.

    :raises StoreError: if the store must be used and cannot.
    """
    if config.store_mode == "disabled":
        source = module_source(config, reason)
        yield PipelineSources(config, {component.name: source for component in components})
        return
    loaded = {c.name: _loaded(c, components, inventories[c.name], config, inputs) for c in components}
    async with open_threads() as crew, AsyncExitStack() as stack:
        store, ready = await _share(loaded, config, crew, stack)
        yield PipelineSources(config, {name: one.make_source for name, one in ready.items()}, ready, store)


def _loaded(
    component: Component,
    all_of_them: Sequence[Component],
    inventory: Inventory,
    config: OffloadConfig,
    inputs: LoadInputs,
) -> Loaded:
    others = tuple(other.module for other in all_of_them if other is not component)
    return Loaded(component.module, inventory, config, attrs.evolve(inputs, neighbours=(*inputs.neighbours, *others)))


async def _share(
    loaded: Mapping[str, Loaded], config: OffloadConfig, crew: ThreadCrew, stack: AsyncExitStack
) -> tuple[HostWeightStore | None, dict[str, Ready]]:
    try:
        store = await stack.enter_async_context(open_store(config.store, crew))
    except StoreError as failure:
        return None, {name: one.without_entry(failure, None) for name, one in loaded.items()}
    return store, {name: await share_loaded(store, crew, stack, one, None) for name, one in loaded.items()}
