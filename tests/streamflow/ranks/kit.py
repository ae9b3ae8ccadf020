"""Ranks in one process, each with a loaded model of its own, and what is left of the memory that they share."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamflow import Offload, OffloadConfig
from streamflow.binding.blocks import BoundBlock
from streamflow.binding.guards import claimed
from streamflow.binding.inventory import Inventory
from streamflow.hardware import Hardware
from streamflow.opening import inventory_of, open_with_source
from streamflow.ranks.agreement import Agreement
from streamflow.ranks.shared_source import SharedModuleSource
from streamflow.stages.devices.base import Device
from streamflow.stages.images import BlockImage
from streamflow.transfer_choice import why_not_page_locked
from streamflow.weights.source import WeightSource

#: What the ranks' one component is called.
NAME = "Model"
#: What the ranks agree on until they stream, in order.
STEPS = [
    *(f"shared copy of {NAME}: {step}" for step in ("plan", "open", "pack", "compare")),
    f"registration of {NAME}",
]


@asynccontextmanager
async def opened(
    model: nn.Module,
    agreement: Agreement,
    options: Mapping[str, Any],
    device: Device,
    *,
    is_required: bool = True,
) -> AsyncIterator[tuple[Offload, SharedModuleSource]]:
    """An offload of one rank's model, from the copy that it shares with the others."""
    config = OffloadConfig.from_mapping(dict(options))
    made: list[SharedModuleSource] = []

    def make_source(inventory: Inventory, blocks: tuple[BoundBlock, ...], backend: Device) -> WeightSource:
        pins = why_not_page_locked(config, device_is_host=backend.is_host) is None
        source = SharedModuleSource(
            NAME,
            inventory,
            blocks,
            "the test wants it so",
            agreement,
            config,
            num_pin_threads=2 if pins else None,
            is_required=is_required,
        )
        made.append(source)
        return source

    with claimed(model, NAME):
        inventory = inventory_of(model, config)
        async with open_with_source(model, inventory, config, make_source, Hardware(device)) as offload:
            yield offload, made[0]


def raise_first(outcomes: list[Any]) -> list[Any]:
    """``outcomes``, if no rank has failed; else what the first one that did has raised."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def copies_left() -> list[str]:
    """Everything by which this process still holds a shared copy: descriptors and mappings."""
    left = descriptors_held() + mappings_held()
    if left:
        gc.collect()  # slow, and nothing may need it
        left = descriptors_held() + mappings_held()
    return left


def descriptors_held() -> list[str]:
    """What the descriptors of shared copies that this process has are of."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return _of_copies(found)


def mappings_held() -> list[str]:
    """The mappings of shared copies that this process has."""
    return _of_copies(Path("/proc/self/maps").read_text().splitlines())


def _of_copies(found: list[str]) -> list[str]:
    return [line for line in found if "memfd:streamflow" in line]


def bytes_of_image(image: BlockImage) -> torch.Tensor:
    """The bytes of an image as a transfer would read them."""
    memory = torch.zeros(image.nbytes, dtype=torch.uint8)
    for piece in image.pieces:
        piece.read_into(memory.data_ptr() + piece.offset_bytes, 0, piece.nbytes)
    return memory
