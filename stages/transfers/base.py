"""The transfer protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from streamflow.stages.devices.base import Event
from streamflow.stages.images import BlockImage


class Fetching(Protocol):
    """A fetch that has begun."""

    @property
    def event(self) -> Event | None:
        """The event that happens when the slot holds the image; None while copies are still to be queued."""

    async def issued(self) -> Event:
        """Return that event once every copy is queued. A cancelled call waits until nothing touches the slot.

        :raises SourceReadError: if the source no longer holds the bytes.
        """


class Transfer(Protocol):
    """Fills slots with block images.

    1. The engine opens it (`scratch_bytes` is then known and counted).
    2. It calls `fetch` on the loop, in the order in which blocks are needed. ``fetch`` returns at once.
    3. It closes it, after every fetch was issued and every event has happened.
    """

    @property
    def name(self) -> str:
        """``direct``, ``staged``, ...: what `statistics` and traces call it."""

    @property
    def scratch_bytes(self) -> int:
        """Device bytes that it holds beside the slots."""

    @property
    def staging_bytes(self) -> int:
        """Page-locked host bytes that it holds."""

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> Fetching:
        """Begin to bring ``image`` into ``slot`` (flat uint8, no smaller than it) once ``after`` has happened."""

    def close(self) -> None:
        """Free what it holds. Idempotent."""


@attrs.frozen
class Issued:
    """A fetch whose copies were all queued at once."""

    event: Event

    async def issued(self) -> Event:
        return self.event
