"""The window: the rotating device buffers, their generation numbers, and the events that a refill must wait for."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.errors import StaleSlotError

#: What freed slots are filled with in tests: NaN in every floating-point dtype, -1 or the maximum in integers.
POISON = 0xFF


@attrs.define(eq=False)
class Slot:
    """One device buffer. ``generation`` counts its refills; ``busy_until`` are the events of its last block's users."""

    index: int
    buffer: torch.Tensor
    block: int | None = None
    generation: int = 0
    busy_until: list[Event] = attrs.field(factory=list)

    def check(self, block: int, generation: int) -> None:
        """Return if the slot still holds ``block`` at ``generation``.

        :raises StaleSlotError: if not.
        """
        if self.generation != generation or self.block != block:
            raise StaleSlotError(block, self.index, generation, self.generation)


class Window:
    """``num_slots`` buffers of ``slot_bytes`` each; it owns them until `close`.

    :raises DeviceMemoryError: if they do not fit; none is held then.
    """

    def __init__(self, device: Device, num_slots: int, slot_bytes: int, *, poison: bool = False) -> None:
        self._device = device
        self._poison = poison
        self._slots: list[Slot] = []
        try:
            for index in range(num_slots):
                self._slots.append(Slot(index, device.allocate(slot_bytes)))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def refill(self, index: int, block: int, generation: int, stream: Stream) -> tuple[Event, ...]:
        """Give the slot to ``block``; returns what the copy into it must wait for."""
        slot = self._slots[index]
        after = tuple(slot.busy_until)
        slot.block, slot.generation = block, generation
        slot.busy_until.clear()
        if self._poison and after:
            for event in after:
                stream.wait(event)
            stream.submit(lambda: _fill(slot.buffer))
            after = (stream.record(),)
        return after

    def close(self) -> None:
        """Free the buffers. Nothing may use them any more. Idempotent."""
        for slot in self._slots:
            self._device.free(slot.buffer)
        self._slots.clear()


def _fill(buffer: torch.Tensor) -> None:
    buffer.fill_(POISON)
