"""The components of an offload on their way to being open: what each is to do, and what it is bound to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from torch import nn

from streamflow.binding.blocks import BoundBlock
from streamflow.binding.inventory import Inventory
from streamflow.binding.poison import Poison
from streamflow.pipelines.policy import Behaviour
from streamflow.stages.devices.base import Device
from streamflow.stages.images import BlockImage
from streamflow.store.reports import StoreReport
from streamflow.weights.source import WeightSource

#: Makes the source once the blocks are known.
MakeSource = Callable[[Inventory, tuple[BoundBlock, ...], Device], WeightSource]


@attrs.frozen(eq=False)
class ComponentToOpen:
    """A claimed component, what it is to do, and where its weights come from.

    ``residents`` are those of its blocks that stay on the device, by their index: for good, or, where components move,
    while the component is used. ``store`` is what the host weight store did for it; None if it is off. ``gathers``:
    ranks gather its blocks together, if there are several.
    """

    name: str
    module: nn.Module
    behaviour: Behaviour
    inventory: Inventory
    make_source: MakeSource
    residents: tuple[int, ...] = ()
    store: StoreReport | None = None
    gathers: bool = True


@attrs.frozen(eq=False)
class BoundComponent:
    """A component with its blocks and their source. The offload knows the blocks by numbers from ``first_block`` on."""

    given: ComponentToOpen
    blocks: tuple[BoundBlock, ...]
    source: WeightSource
    first_block: int

    @property
    def name(self) -> str:
        """The component's name."""
        return self.given.name

    @property
    def images(self) -> dict[int, BlockImage]:
        """The block images by their numbers, under names of their own. After `WeightSource.prepare`."""
        return {
            self.first_block + index: attrs.evolve(image, name=f"{self.name}.{image.name}".rstrip("."))
            for index, image in self.source.images.items()
        }

    @property
    def residents(self) -> tuple[int, ...]:
        """The numbers of the resident blocks."""
        return tuple(self.first_block + index for index in self.given.residents)

    @property
    def moving(self) -> Mapping[int, BlockImage]:
        """What of it comes and goes as a whole: all of a staged component, the residents of a streamed one."""
        if self.given.behaviour is Behaviour.STAGED:
            return self.images
        return {number: image for number, image in self.images.items() if number in self.residents}


def bind_components(components: Sequence[ComponentToOpen], device: Device) -> Iterator[BoundComponent]:
    """Each component with its blocks numbered after those of the ones before, one at a time.

    Whoever gets one has to release its source.
    """
    poison = Poison(device.torch_device)
    first_block = 0
    for given in components:
        staged = given.behaviour is Behaviour.STAGED
        blocks = tuple(BoundBlock(tensors, poison, rests_on_host=staged) for tensors in given.inventory.blocks)
        yield BoundComponent(given, blocks, given.make_source(given.inventory, blocks, device), first_block)
        first_block += len(blocks)
