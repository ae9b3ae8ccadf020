"""Movables: the blocks of one component that come to the device together and go together."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack, suppress

import torch

from streamflow.stages.binder import Binder
from streamflow.stages.devices.base import Device, Event
from streamflow.stages.errors import DeviceStreamError
from streamflow.stages.images import BlockImage
from streamflow.stages.transfers.base import Transfer


class Movable:
    """What of one component moves: a whole encoder (one block), or the resident blocks of a transformer.

    Order of use: `allocate`, `fetch`, `bind`; `unbind`, `free`; and again. Whatever failed before, `unbind` and `free`
    undo what was done. The sources are only read: what goes is dropped, nothing is copied back.

    ``there`` is kept up to date with the blocks that are there, each with the event by which it is.
    """

    def __init__(
        self,
        name: str,
        images: Mapping[int, BlockImage],
        binder: Binder,
        device: Device,
        there: MutableMapping[int, Event] | None = None,
    ) -> None:
        self.name = name
        self.images = images
        self.nbytes = sum(image.nbytes for image in images.values())
        self.ready: tuple[Event, ...] = ()
        self._there = {} if there is None else there
        self._binder = binder
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        self._users: list[Event] = []

    def allocate(self) -> None:
        """Get the device memory. Blocks.

        :raises DeviceMemoryError: if it does not fit; nothing is held then.
        """
        try:
            for block, image in self.images.items():
                self._buffers[block] = self._device.allocate(image.nbytes)
        except BaseException:
            self.free()
            raise

    async def fetch(self, transfer: Transfer) -> None:
        """Queue all copies; `ready` are the events by which the blocks are there.

        :raises SourceReadError: if a source no longer holds the bytes.
        """
        for block, image in self.images.items():
            self.ready += (await transfer.fetch(image, self._buffers[block], ()).issued(),)

    def bind(self) -> None:
        """Point the blocks' tensors at the device. On the loop."""
        for (block, buffer), event in zip(self._buffers.items(), self.ready, strict=True):
            self._binder.bind(block, -1 - block, buffer)
            self._there[block] = event

    def note_use(self, event: Event) -> None:
        """Work that uses the blocks is done when ``event`` happens."""
        self._users = [other for other in self._users if not other.is_done()]
        self._users.append(event)

    def unbind(self) -> None:
        """Point the tensors away from the device again. On the loop, while nobody is inside."""
        with ExitStack() as all_of_them:
            for block in self._buffers:
                self._there.pop(block, None)
                all_of_them.callback(self._binder.unbind, block)

    def free(self) -> None:
        """Give the device memory back, once the device is done with it. Blocks. Idempotent."""
        for event in (*self.ready, *self._users):
            with suppress(DeviceStreamError):  # told to whoever waited for it
                event.wait()
        self.ready, self._users = (), []
        while self._buffers:
            self._device.free(self._buffers.popitem()[1])
