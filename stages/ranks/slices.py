"""Cutting block images into slices, one for each rank. Pure: no torch, no clock.

A gather brings equal slices together. Nothing is padded: what is left at the end of an image, less than 256 bytes for
each rank, is every rank's own to copy.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

import attrs

from streamflow.stages.layout import ALIGNMENT_BYTES
from streamflow.stages.transfers.chunks import Chunk, Part, plan_chunks


class _Piece(Protocol):
    @property
    def offset_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def splittable(self) -> bool: ...


class _Image(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def pieces(self) -> Sequence[_Piece]: ...


@attrs.frozen
class Run:
    """Bytes ``offset`` to ``offset + nbytes`` of an image."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.offset + self.nbytes


@attrs.frozen
class GatherChunk:
    """A run of an image that is gathered at once: rank r brings ``slice_bytes`` from ``image_offset + r * slice_bytes``
    on.
    """

    image_offset: int
    slice_bytes: int

    def slice_of(self, rank: int) -> Run:
        """What ``rank`` brings."""
        return Run(self.image_offset + rank * self.slice_bytes, self.slice_bytes)


@attrs.frozen
class GatherPlan:
    """How ranks bring an image together: chunks from its beginning on, in order; then the tail, which each copies."""

    chunks: tuple[GatherChunk, ...]
    tail_offset: int
    tail_bytes: int

    @property
    def copied_bytes(self) -> int:
        """What each rank copies from its host, all of them as much."""
        return sum(chunk.slice_bytes for chunk in self.chunks) + self.tail_bytes

    def runs_of(self, rank: int) -> tuple[Run, ...]:
        """What ``rank`` copies from the host: its slice of every chunk, in order, and the tail, which may be empty."""
        return (*(chunk.slice_of(rank) for chunk in self.chunks), Run(self.tail_offset, self.tail_bytes))


def plan_gather(nbytes: int, size: int, chunk_bytes: int) -> GatherPlan:
    """Cut an image of ``nbytes`` for ``size`` ranks into chunks of at most ``chunk_bytes``, all ranks' slices together.

    Every byte is in one rank's slice of one chunk, or in the tail, of fewer than ``size * 256`` bytes. All slices begin
    and end at multiples of 256. ``chunk_bytes`` is rounded down to a multiple of ``size * 256``, but not to none.

    :raises ValueError: if ``size`` is below 1, ``nbytes`` below 0, or ``chunk_bytes`` below 256.
    """
    if size < 1 or nbytes < 0 or chunk_bytes < ALIGNMENT_BYTES:
        raise ValueError(
            f"{nbytes} bytes cannot be cut for {size} ranks in chunks of {chunk_bytes}: there must be a rank, "
            f"and a chunk must have at least {ALIGNMENT_BYTES} bytes"
        )
    unit = size * ALIGNMENT_BYTES
    largest = max(unit, chunk_bytes - chunk_bytes % unit)
    gathered = nbytes - nbytes % unit
    chunks = tuple(
        GatherChunk(offset, min(largest, gathered - offset) // size) for offset in range(0, gathered, largest)
    )
    return GatherPlan(chunks, gathered, nbytes - gathered)


@attrs.frozen
class Clip:
    """Bytes ``start`` to ``start + nbytes`` of piece ``piece``, which lie at ``offset_bytes`` in the image."""

    piece: int
    start: int
    offset_bytes: int
    nbytes: int
    splittable: bool = True


def clip(pieces: Sequence[_Piece], runs: Iterable[Run]) -> tuple[tuple[Clip, ...], ...]:
    """What of the pieces (by ascending offset) lies in each of ``runs``; what lies between pieces is in none."""
    ends = [piece.offset_bytes + piece.nbytes for piece in pieces]
    return tuple(tuple(_clip(pieces, ends, run)) for run in runs)


def _clip(pieces: Sequence[_Piece], ends: Sequence[int], run: Run) -> Iterator[Clip]:
    for index in range(bisect.bisect_right(ends, run.offset), len(pieces)):
        piece = pieces[index]
        start, end = max(run.offset, piece.offset_bytes), min(run.end, ends[index])
        if start >= run.end:
            return
        if start < end:
            yield Clip(index, start - piece.offset_bytes, start, end - start)


def plan_clips(clips: Sequence[Clip], chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut the clips of one run into chunks for the packing threads, as `plan_chunks` does with whole pieces.

    :raises ValueError: if ``chunk_bytes`` is below 256.
    """
    return tuple(
        attrs.evolve(chunk, parts=tuple(_of_piece(clips[part.piece], part) for part in chunk.parts))
        for chunk in plan_chunks(clips, chunk_bytes)
    )


def _of_piece(clipped: Clip, part: Part) -> Part:
    return attrs.evolve(part, piece=clipped.piece, start=clipped.start + part.start)


def cannot_be_cut(images: Collection[_Image]) -> frozenset[str]:
    """The names of those images of which a rank cannot bring a slice: they have pieces that are read only as a whole.

    Ranks fetch these whole.
    """
    return frozenset(image.name for image in images if not all(piece.splittable for piece in image.pieces))
