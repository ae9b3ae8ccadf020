"""Which tensor of which component goes where, also where components have tensors in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from streamflow.binding.inventory import Inventory, take_inventory
from streamflow.discovery import Block, find_blocks
from streamflow.pipelines.discovery import Component
from streamflow.pipelines.policy import Behaviour
from streamflow.support import check_not_compiled_whole

#: The path of the one block of a component that moves as a whole.
WHOLE = "(whole)"


def take_inventories(components: Sequence[Component], behaviours: Mapping[str, Behaviour]) -> dict[str, Inventory]:
    """The inventory of each component by its name; nothing is changed.

    A tensor that two components have is fixed, and is the first one's to move.

    :raises PlanError: if the blocks of a streamed component are not found.
    :raises UnsupportedModelError: if a component cannot be moved exactly.
    """
    shared = _shared_tensors([component.module for component in components])
    inventories: dict[str, Inventory] = {}
    taken: set[int] = set()
    for component in components:
        found = _take(component, behaviours[component.name], shared)
        inventories[component.name] = found.without_fixed(taken)
        taken |= shared & {id(owned.tensor) for owned in found.fixed}
    return inventories


def _shared_tensors(modules: Sequence[nn.Module]) -> set[int]:
    counts: Counter[int] = Counter()
    for module in modules:
        counts.update({id(tensor) for tensor in (*module.parameters(), *module.buffers())})
    return {tensor for tensor, count in counts.items() if count > 1}


def _take(component: Component, behaviour: Behaviour, shared: Collection[int]) -> Inventory:
    module = component.module
    if behaviour is Behaviour.STREAMED:
        blocks = find_blocks(module, component.plan)
        check_not_compiled_whole(module, [block.module for block in blocks])
        return take_inventory(module, blocks, shared)
    whole = [Block(WHOLE, module, "", False)] if behaviour is Behaviour.STAGED else []
    return take_inventory(module, whole, shared)
