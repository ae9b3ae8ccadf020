"""Where images lie in the one host copy of a group of ranks, and which rank packs what. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from streamflow.stages.layout import align_up

#: Where images begin, and ranks' parts: a whole number of pages of any machine, as in the files of the store.
IMAGE_ALIGNMENT_BYTES = 64 << 10


@attrs.frozen
class SharedLayout:
    """``offsets`` of the images in a copy of ``nbytes``."""

    offsets: tuple[int, ...]
    nbytes: int


@attrs.frozen
class Part:
    """``nbytes`` from ``start`` on of the ``piece``-th piece of the ``image``-th image; at ``offset`` in the copy."""

    image: int
    piece: int
    start: int
    nbytes: int
    offset: int


def lay_out(sizes: Sequence[int]) -> SharedLayout:
    """Images of these sizes, one after the other."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = align_up(end + size, IMAGE_ALIGNMENT_BYTES)
    return SharedLayout(tuple(offsets), end)


def share_of(rank: int, size: int, nbytes: int) -> tuple[int, int]:
    """Where the part of a copy that ``rank`` of ``size`` packs begins and ends. Together the parts are the copy."""
    units = -(-nbytes // IMAGE_ALIGNMENT_BYTES)
    first, last = units * rank // size, units * (rank + 1) // size
    return min(first * IMAGE_ALIGNMENT_BYTES, nbytes), min(last * IMAGE_ALIGNMENT_BYTES, nbytes)


def parts_between(
    pieces: Sequence[Sequence[tuple[int, int]]], layout: SharedLayout, start: int, end: int, *, max_bytes: int
) -> Iterator[Part]:
    """The parts of all pieces that lie between ``start`` and ``end`` of the copy, none larger than ``max_bytes``.

    ``pieces``: offset in its image and size of each piece, for each image.
    """
    for image, (base, extents) in enumerate(zip(layout.offsets, pieces, strict=True)):
        for piece, (offset, nbytes) in enumerate(extents):
            begin = base + offset
            first, last = max(start, begin), min(end, begin + nbytes)
            for at in range(first, last, max_bytes):
                yield Part(image, piece, at - begin, min(max_bytes, last - at), at)
