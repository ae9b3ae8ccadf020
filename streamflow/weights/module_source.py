"""The module as a source: block images over the tensors that the ordinary loader left in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from streamflow.binding.blocks import BoundBlock
from streamflow.binding.inventory import region_bytes
from streamflow.errors import HostMemoryError
from streamflow.host_limits import available_host_bytes
from streamflow.stages.devices.base import Device
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import BlockImage, MemoryPiece, memory_image, view_of
from streamflow.stages.layout import ImageLayout
from streamflow.stages.progress import progress
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.threads import ThreadCrew
from streamflow.weights.many_threads import for_each


def module_images(blocks: Sequence[BoundBlock]) -> dict[int, BlockImage]:
    """Images whose pieces are the module's own tensors; no byte is copied. Valid while these tensors are unchanged."""
    return {index: _tensor_image(block) for index, block in enumerate(blocks)}


def _tensor_image(block: BoundBlock) -> BlockImage:
    host = dict(zip(block.names, block.host, strict=True))
    return BlockImage(block.path, block.layout, memory_pieces(block.layout, host))


def memory_pieces(layout: ImageLayout, tensors: Mapping[str, torch.Tensor]) -> tuple[MemoryPiece, ...]:
    """The pieces of an image where its tensors, given by name, lie now."""
    return tuple(
        MemoryPiece(region.offset_bytes, region_bytes(region, tensors[region.names[0]]))
        for region in layout.regions
        if region.nbytes
    )


class PinnedImages:
    """Private images of the blocks, page-locked at exactly their size.

    `pack` copies block by block and lets each block's tensors show its image at once, so that the host holds the model
    and a few blocks at most. The images stay the module's host memory after `release`, which only unlocks them: a
    failed or cancelled `pack` leaves equal weights in the module too.
    """

    def __init__(self, device: Device, blocks: Sequence[BoundBlock]) -> None:
        self._device = device
        self._blocks = blocks
        self._locks: list[PageLock] = []
        self._images: dict[int, BlockImage] = {}

    @property
    def images(self) -> Mapping[int, BlockImage]:
        """The images packed so far, by block."""
        return self._images

    async def pack(self, crew: ThreadCrew, num_threads: int) -> None:
        """Make all images. Cancellable between blocks.

        :raises HostMemoryError: if a block's image does not fit.
        :raises HostRegistrationError: if the device refuses to lock its pages.
        """
        await for_each(range(len(self._blocks)), self._pack_block, crew, num_threads)

    def _pack_block(self, index: int) -> None:
        block = self._blocks[index]
        available = available_host_bytes()
        if available is not None and block.layout.nbytes > available:
            raise HostMemoryError(block.layout.nbytes, available)
        memory = allocate_host(block.layout.nbytes)
        for piece in _tensor_image(block).pieces:
            piece.read_into(memory.data_ptr() + piece.offset_bytes, 0, piece.nbytes)
        if block.layout.nbytes:
            self._locks.append(PageLock(self._device.registrar, memory))
        self._images[index] = memory_image(block.path, block.layout, memory, page_locked=True)
        with torch.inference_mode(False):
            block.replace_host([view_of(memory, view) for view in block.layout.views])
        progress("page-locking blocks", len(self._images), len(self._blocks))

    def pageable(self) -> Mapping[int, BlockImage]:
        """The images once they are unlocked: the same memory, which no device reads without a host pass any more.

        :raises HostRegistrationError: if the device refuses to unlock them.
        """
        self.release()
        for index, image in self._images.items():
            pieces = tuple(MemoryPiece(piece.offset_bytes, run) for piece in image.pieces for run in piece.runs)
            self._images[index] = attrs.evolve(image, pieces=pieces)
        return self._images

    def release(self) -> None:
        """Unlock the pages; what the device refuses to unlock stays and can be tried again. Idempotent.

        :raises HostRegistrationError: if the device refuses.
        """
        while self._locks:
            self._locks[-1].release()
            self._locks.pop()
