"""A loaded model on each of several ranks in one process, and the source that they share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import torch
from torch import nn

from streamflow.binding.blocks import BoundBlock
from streamflow.binding.poison import Poison
from streamflow.config import OffloadConfig
from streamflow.opening import inventory_of
from streamflow.ranks.agreement import Agreement
from streamflow.ranks.shared_source import SharedModuleSource
from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.images import BlockImage
from streamflow.stages.threads import ThreadCrew, open_threads

NAME = "Model"


@attrs.frozen(eq=False)
class Rank:
    """One rank's model, its source, and its threads."""

    model: nn.Module
    source: SharedModuleSource
    device: Device
    crew: ThreadCrew

    async def prepare(self) -> None:
        await self.source.prepare(self.device, self.crew)

    def image_bytes(self, index: int) -> bytes:
        """The bytes of a block image as a transfer would read them."""
        return read_image(self.source.images[index])


def read_image(image: BlockImage) -> bytes:
    memory = torch.zeros(image.nbytes, dtype=torch.uint8)
    for piece in image.pieces:
        piece.read_into(memory.data_ptr() + piece.offset_bytes, 0, piece.nbytes)
    return bytes(memory.numpy().tobytes()) if False else bytes(memory.tolist())
