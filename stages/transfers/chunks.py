"""Cutting a block image into chunks for the packing threads. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from streamflow.stages.layout import ALIGNMENT_BYTES, align_up


class _Extent(Protocol):
    @property
    def offset_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def splittable(self) -> bool: ...


@attrs.frozen
class Part:
    """Bytes ``start`` to ``start + nbytes`` of piece ``piece``, at ``chunk_offset`` bytes into the chunk."""

    piece: int
    start: int
    nbytes: int
    chunk_offset: int


@attrs.frozen
class Chunk:
    """A run of the image that is packed by one thread and copied at once."""

    image_offset: int
    nbytes: int
    parts: tuple[Part, ...]


def plan_chunks(pieces: Sequence[_Extent], chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut the pieces (by ascending offset) into chunks of at most ``chunk_bytes``; an unsplittable piece may exceed it.

    Every byte of every piece is in exactly one part. Chunks begin where a piece does or at a multiple of 256 bytes
    behind it: ``chunk_bytes`` is rounded down to one.

    :raises ValueError: if ``chunk_bytes`` is below 256.
    """
    if chunk_bytes < ALIGNMENT_BYTES:
        raise ValueError(f"a chunk must have at least {ALIGNMENT_BYTES} bytes, not {chunk_bytes}")
    chunk_bytes -= chunk_bytes % ALIGNMENT_BYTES
    chunks: list[Chunk] = []
    parts: list[Part] = []
    start_of_chunk = 0

    def finish() -> None:
        if parts:
            end = parts[-1].chunk_offset + parts[-1].nbytes
            chunks.append(Chunk(start_of_chunk, end, tuple(parts)))
            parts.clear()

    for index, piece in enumerate(pieces):
        done = 0
        while done < piece.nbytes:
            offset = piece.offset_bytes + done
            room = chunk_bytes - (offset - start_of_chunk) if parts else 0
            rest = piece.nbytes - done
            if room <= 0 or (rest > room and not piece.splittable):
                finish()
                start_of_chunk, room = offset, chunk_bytes
            take = min(rest, room) if piece.splittable else rest
            parts.append(Part(index, done, take, offset - start_of_chunk))
            done += take
    finish()
    return tuple(chunks)


def largest_chunk(images: Sequence[Sequence[_Extent]], chunk_bytes: int) -> int:
    """Bytes that a staging buffer needs for these images (each a sequence of pieces)."""
    sizes = (chunk.nbytes for pieces in images for chunk in plan_chunks(pieces, chunk_bytes))
    return align_up(max(sizes, default=0))
