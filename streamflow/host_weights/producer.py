"""The producer: turns a model, or the checkpoint that it would be loaded from, into a draft that can be published.

1. A draft is made once the model is final: loaded, with its post-load hooks run, calibrated and in eval mode.
2. Publishing reads it from several threads, each image from its start to its end.
3. What it reads from (the module's tensors, the open checkpoint) must stay as it is until publishing ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from streamflow.binding.inventory import Inventory
from streamflow.host_weights.ownership import Ownership
from streamflow.stages.images import Piece
from streamflow.stages.layout import ImageLayout
from streamflow.store.draft import Draft
from streamflow.weights.checkpoint import Checkpoint
from streamflow.weights.checkpoint_plan import CheckpointPlan
from streamflow.weights.module_source import memory_pieces
from streamflow.weights.pieces import checkpoint_block_pieces


def draft_of_module(ownership: Ownership, inventory: Inventory, metadata: Mapping[str, Any]) -> Draft:
    """A draft of what the module's own tensors hold."""
    tensors = _by_name(inventory)
    pieces = [memory_pieces(layout, tensors) for layout in ownership.layouts]
    return Draft(images=ownership.images, read=ImageReader(pieces), metadata=metadata)


def draft_of_checkpoint(
    ownership: Ownership,
    inventory: Inventory,
    checkpoint: Checkpoint,
    plan: CheckpointPlan,
    metadata: Mapping[str, Any],
) -> Draft:
    """A draft of what loading the checkpoint would give, without loading it; other buffers come from the module.

    :raises CheckpointRegionError: if the files do not hold a tensor as the module needs it.
    """
    tensors = _by_name(inventory)
    pieces: list[Sequence[Piece]] = []
    for layout in ownership.layouts:
        in_files = _part_of(layout, [view.name for view in layout.views if view.name in plan.assignments])
        in_module = _part_of(layout, [view.name for view in layout.views if view.name not in plan.assignments])
        found = [*checkpoint_block_pieces(in_files, checkpoint, plan.assignments), *memory_pieces(in_module, tensors)]
        pieces.append(sorted(found, key=lambda piece: piece.offset_bytes))
    return Draft(images=ownership.images, read=ImageReader(pieces), metadata=metadata)


def _by_name(inventory: Inventory) -> dict[str, torch.Tensor]:
    tensors = (*inventory.fixed, *(owned for block in inventory.blocks for owned in block.tensors))
    return {owned.name: owned.tensor.data for owned in tensors}


def _part_of(layout: ImageLayout, names: Sequence[str]) -> ImageLayout:
    """The same places, for the regions of these names alone."""
    regions = tuple(region for region in layout.regions if region.names[0] in names)
    views = tuple(view for view in layout.views if any(view.name in region.names for region in regions))
    return ImageLayout(views, regions, layout.nbytes)


class ImageReader:
    """Reads runs of images from their pieces; what no piece covers is zeros.

    Threads may read different images at once, and one image only from its start to its end: a piece that can only be
    made whole is kept until the run has passed it.
    """

    def __init__(self, pieces: Sequence[Sequence[Piece]]) -> None:
        self._pieces = pieces
        self._whole: dict[int, tuple[Piece, ctypes.Array[ctypes.c_char]]] = {}

    def __call__(self, image: int, target: memoryview, start: int) -> None:
        """Fill ``target`` with the image's bytes from ``start`` on. Blocks.

        :raises SourceReadError: if a piece cannot be read.
        """
        run = (ctypes.c_char * target.nbytes).from_buffer(target)
        base, end = ctypes.addressof(run), start + target.nbytes
        ctypes.memset(base, 0, target.nbytes)
        for piece in self._pieces[image]:
            first, last = max(start, piece.offset_bytes), min(end, piece.offset_bytes + piece.nbytes)
            if first < last:
                self._read(image, piece, base + first - start, first - piece.offset_bytes, last - first)

    def _read(self, image: int, piece: Piece, address: int, start: int, nbytes: int) -> None:
        if piece.splittable or nbytes == piece.nbytes:
            piece.read_into(address, start, nbytes)
            return
        kept = self._whole.get(image)
        if kept is None or kept[0] is not piece:
            made = (ctypes.c_char * piece.nbytes)()
            piece.read_into(ctypes.addressof(made), 0, piece.nbytes)
            kept = self._whole[image] = (piece, made)
        ctypes.memmove(address, ctypes.addressof(kept[1]) + start, nbytes)
        if start + nbytes == piece.nbytes:
            del self._whole[image]
