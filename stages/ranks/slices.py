"""Cutting block images into slices, one for each rank. Pure: no torch, no clock.

A gather brings equal slices together. Nothing is padded: what is left at the end of an image, less than 256 bytes for
each rank, is every rank's own to copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
class _Clip:
    """The part of a piece that lies in a run."""

    piece: int
    start: int
    offset_bytes: int
    nbytes: int
    splittable: bool = True


def clip(pieces: Sequence[_Piece], run: Run) -> Iterator[_Clip]:
    """What of the pieces (by ascending offset) lies in ``run``; what lies between pieces is in none."""
    for index, piece in enumerate(pieces):
        start = max(run.offset, piece.offset_bytes)
        end = min(run.end, piece.offset_bytes + piece.nbytes)
        if start < end:
            yield _Clip(index, start - piece.offset_bytes, start, end - start)


def plan_run(pieces: Sequence[_Piece], run: Run, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut what of the pieces lies in ``run`` into chunks for the packing threads, as `plan_chunks` does with images.

    :raises ValueError: if ``chunk_bytes`` is below 256.
    """
    clips = tuple(clip(pieces, run))
    return tuple(
        attrs.evolve(chunk, parts=tuple(_of_piece(clips[part.piece], part) for part in chunk.parts))
        for chunk in plan_chunks(clips, chunk_bytes)
    )


def _of_piece(clipped: _Clip, part: Part) -> Part:
    return attrs.evolve(part, piece=clipped.piece, start=clipped.start + part.start)


def check_can_be_cut(images: Collection[_Image]) -> None:
    """Return if every piece of ``images`` can be read in part.

    :raises ValueError: if one cannot: its block is to be fetched whole.
    """
    whole = [image.name for image in images if not all(piece.splittable for piece in image.pieces)]
    if whole:
        raise ValueError(
            f"{', '.join(whole)}: their pieces can be read only as a whole, so no rank can bring a slice of them; "
            "fetch these blocks whole on every rank (local)"
        )
