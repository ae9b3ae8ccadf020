"""Toy blocks: block images of unequal sizes with known bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from streamflow.stages.images import BlockImage, MemoryPiece, Piece, memory_image
from streamflow.stages.layout import ImageLayout, TensorSpec, plan_layout

#: Changes a piece into a scripted one; gets the block and the piece.
WrapPiece = Callable[[int, Piece], Piece]


@attrs.frozen(eq=False)
class ToyBlocks:
    """Images by block, and the bytes that a slot must hold for each (flat uint8, CPU; holes in it are zero)."""

    images: Mapping[int, BlockImage]
    expected: Mapping[int, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """All images together, in the slot form."""
        return sum(image.nbytes for image in self.images.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest image."""
        return max((image.nbytes for image in self.images.values()), default=0)

    def is_exact(self, block: int, seen: torch.Tensor) -> bool:
        """Whether ``seen`` (what a slot held, on any device) has the block's bytes; holes do not count."""
        seen, expected = seen.cpu(), self.expected[block]
        regions = self.images[block].layout.regions
        return all(
            torch.equal(seen[r.offset_bytes : r.offset_bytes + r.nbytes], expected[r.offset_bytes :][: r.nbytes])
            for r in regions
        )


def toy_blocks(tensor_bytes: Sequence[Sequence[int]], seed: int = 0) -> ToyBlocks:
    """One block for each entry, of tensors with these sizes in bytes; each image lies whole in host memory."""
    randomness = random.Random(seed)
    images: dict[int, BlockImage] = {}
    expected: dict[int, torch.Tensor] = {}
    for block, sizes in enumerate(tensor_bytes):
        layout = plan_layout(TensorSpec(f"t{i}", "uint8", (size,), (1,)) for i, size in enumerate(sizes))
        expected[block] = _fill(layout, randomness)
        images[block] = memory_image(f"block {block}", layout, expected[block])
    return ToyBlocks(images, expected)


def _fill(layout: ImageLayout, randomness: random.Random) -> torch.Tensor:
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for region in layout.regions:
        data = torch.frombuffer(bytearray(randomness.randbytes(region.nbytes) or b"\0"), dtype=torch.uint8)
        memory[region.offset_bytes : region.offset_bytes + region.nbytes] = data[: region.nbytes]
    return memory


def in_pieces(blocks: ToyBlocks, wrap: WrapPiece = lambda block, piece: piece) -> ToyBlocks:
    """The same blocks, but each region a piece of its own, and no image whole in memory."""
    return ToyBlocks({block: _cut(block, image, wrap) for block, image in blocks.images.items()}, blocks.expected)


def _cut(block: int, image: BlockImage, wrap: WrapPiece) -> BlockImage:
    memory = image.memory
    if memory is None:
        if image.nbytes:
            raise ValueError(f"{image.name} does not lie whole in memory, so it cannot be cut into pieces")
        return image
    pieces = tuple(
        wrap(block, MemoryPiece(r.offset_bytes, memory[r.offset_bytes : r.offset_bytes + r.nbytes].clone()))
        for r in image.layout.regions
        if r.nbytes
    )
    return BlockImage(image.name, image.layout, pieces)
