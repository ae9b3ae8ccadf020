"""What an open offload has put into a model, in the order in which it came, and the way back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import attrs
import torch
from torch import nn

from streamflow.binding.blocks import BlockBinder, BoundBlock
from streamflow.binding.calls import Around, Interception
from streamflow.binding.fixed import FixedTensors
from streamflow.binding.guards import Guards, ReadStreamed
from streamflow.binding.inventory import Inventory
from streamflow.runtime.component import StreamedComponent
from streamflow.stages.devices.base import Device
from streamflow.stages.threads import ThreadCrew
from streamflow.weights.source import WeightSource


@attrs.frozen(eq=False)
class Attachment:
    """A model whose fixed tensors are on the device and whose blocks show poison until the engine binds them."""

    model: nn.Module
    blocks: tuple[BoundBlock, ...]
    binder: BlockBinder
    fixed: FixedTensors
    source: WeightSource


@asynccontextmanager
async def attach(
    model: nn.Module,
    name: str,
    inventory: Inventory,
    blocks: tuple[BoundBlock, ...],
    source: WeightSource,
    device: Device,
    crew: ThreadCrew,
) -> AsyncIterator[Attachment]:
    """The model, attached. Leaving undoes every step, also when a later one fails.

    :raises DeviceMemoryError: if the fixed tensors do not fit.
    :raises HostMemoryError: if page-locked images do not fit.
    """
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
        binder.show_poison()
        yield Attachment(model, blocks, binder, fixed, source)


def _reader(binder: BlockBinder, source: WeightSource) -> ReadStreamed:
    located = binder.locate()

    def read(tensor: torch.Tensor) -> torch.Tensor | None:
        found = located.get(id(tensor))
        return None if found is None else source.read_tensor(*found)

    return read


class Interceptions:
    """All interceptions of one component. `remove` takes them away in any state."""

    def __init__(self, model: nn.Module, modules: list[nn.Module], component: StreamedComponent) -> None:
        self._all = [Interception(model, component.run_forward)]
        self._all += [Interception(module, _around_block(component, i)) for i, module in enumerate(modules)]
        self._installed: list[Interception] = []

    def install(self) -> None:
        """Stand between callers and the component, and between it and its blocks."""
        for interception in self._all:
            interception.install()
            self._installed.append(interception)

    def remove(self) -> None:
        """Leave the modules as they were found. Idempotent."""
        while self._installed:
            self._installed.pop().remove()


def _around_block(component: StreamedComponent, index: int) -> Around:
    return lambda call, args, kwargs: component.run_block(index, call, args, kwargs)
