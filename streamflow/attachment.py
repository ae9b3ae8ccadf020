"""What an open offload has put into a model, in the order in which it came, and the way back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager

import attrs
import torch
from torch import nn

from streamflow.binding.blocks import BlockBinder, BoundBlock
from streamflow.binding.calls import Around, Interception, MethodInterception
from streamflow.binding.fixed import FixedTensors
from streamflow.binding.guards import Guards, ReadStreamed
from streamflow.component_parts import BoundComponent
from streamflow.runtime.component import StreamedComponent
from streamflow.runtime.staged_component import StagedComponent
from streamflow.stages.devices.base import Device
from streamflow.stages.threads import ThreadCrew
from streamflow.support import outside_of_compiled
from streamflow.weights.source import WeightSource

#: Methods by which callers use encoders and VAEs without calling a module in them first.
ENTRY_METHODS = (
    "encode",
    "decode",
    "tiled_encode",
    "tiled_decode",
    "generate",
    "get_text_features",
    "get_image_features",
)


@attrs.frozen(eq=False)
class Attachment:
    """A module whose fixed tensors are on the device and whose blocks are unbound until the engine binds them."""

    model: nn.Module
    blocks: tuple[BoundBlock, ...]
    binder: BlockBinder
    fixed: FixedTensors
    source: WeightSource


@asynccontextmanager
async def attach(component: BoundComponent, device: Device, crew: ThreadCrew) -> AsyncIterator[Attachment]:
    """The component, attached. Leaving undoes every step, also when a later one fails.

    :raises DeviceMemoryError: if the fixed tensors do not fit.
    :raises HostMemoryError: if page-locked images do not fit.
    """
    model, blocks, source = component.given.module, component.blocks, component.source
    inventory, name = component.given.inventory, component.name
    binder = BlockBinder(blocks)
    guards = Guards(model, name, device.torch_device)
    with ExitStack() as undo:
        await source.prepare(device, crew)
        fixed = FixedTensors(inventory.fixed, device, source.is_in_module)
        undo.callback(fixed.free)
        await crew.call(lambda: fixed.load(source.fill), name="loading fixed tensors")
        undo.callback(guards.remove)
        guards.install(_reader(binder, source))
        undo.callback(fixed.show_host)
        fixed.show_device()
        undo.callback(binder.show_host)
        binder.show_rest()
        yield Attachment(model, blocks, binder, fixed, source)


def _reader(binder: BlockBinder, source: WeightSource) -> ReadStreamed:
    located = binder.locate()

    def read(tensor: torch.Tensor) -> torch.Tensor | None:
        found = located.get(id(tensor))
        return None if found is None else source.read_tensor(*found)

    return read


class Interceptions:
    """All interceptions of one offload. `remove` takes them away in any state."""

    def __init__(self, interceptions: Iterable[Interception | MethodInterception]) -> None:
        self._all = tuple(interceptions)
        self._installed: list[Interception | MethodInterception] = []

    def install(self) -> None:
        """Stand between callers and the components, and between these and their blocks."""
        for interception in self._all:
            interception.install()
            self._installed.append(interception)

    def remove(self) -> None:
        """Leave the modules as they were found. Idempotent."""
        while self._installed:
            self._installed.pop().remove()


def around_streamed(
    model: nn.Module, blocks: Iterable[nn.Module], component: StreamedComponent
) -> Iterator[Interception]:
    """Between the callers of a streamed component and it, and between it and its blocks."""
    yield Interception(model, component.run_forward)
    for index, block in enumerate(blocks):
        yield Interception(block, _around_block(component, index))


def around_staged(model: nn.Module, component: StagedComponent) -> Iterator[Interception | MethodInterception]:
    """Between the callers of a staged component and all that they may call of it: itself, its methods, its modules.

    What lies inside of compiled code is left alone: nobody calls it from outside.
    """
    for method in ENTRY_METHODS:
        if callable(getattr(model, method, None)):
            yield MethodInterception(model, method, component.run)
    for module in outside_of_compiled(model):
        yield Interception(module, component.run)


def _around_block(component: StreamedComponent, index: int) -> Around:
    return lambda call, args, kwargs: component.run_block(index, call, args, kwargs)
