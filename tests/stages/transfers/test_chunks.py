"""Cutting images into chunks: every byte once, within the limit, aligned."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.layout import ALIGNMENT_BYTES, align_up
from streamflow.stages.transfers.chunks import Chunk, Part, largest_chunk, plan_chunks


@attrs.frozen
class Extent:
    offset_bytes: int
    nbytes: int
    splittable: bool = True


@st.composite
def extents(draw: st.DrawFn) -> tuple[Extent, ...]:
    """Pieces by ascending offset, aligned, with holes; some may not be split, some are empty."""
    pieces: list[Extent] = []
    offset = 0
    for _ in range(draw(st.integers(0, 8))):
        offset = align_up(offset) + ALIGNMENT_BYTES * draw(st.sampled_from([0, 0, 1, 9]))
        pieces.append(Extent(offset, draw(st.integers(0, 3000)), draw(st.booleans())))
        offset += pieces[-1].nbytes
    return tuple(pieces)


LIMITS = st.integers(ALIGNMENT_BYTES, 4096)


@given(extents(), LIMITS)
def test_every_byte_of_every_piece_is_in_exactly_one_part_at_its_place(pieces: tuple[Extent, ...], limit: int) -> None:
    done = [0] * len(pieces)
    for chunk in plan_chunks(pieces, limit):
        for part in chunk.parts:
            assert part.nbytes > 0
            assert part.start == done[part.piece]
            assert chunk.image_offset + part.chunk_offset == pieces[part.piece].offset_bytes + part.start
            done[part.piece] += part.nbytes
    assert done == [piece.nbytes for piece in pieces]


@given(extents(), LIMITS)
def test_chunks_keep_to_the_limit_except_for_one_piece_that_cannot_be_split(
    pieces: tuple[Extent, ...], limit: int
) -> None:
    for chunk in plan_chunks(pieces, limit):
        if chunk.nbytes > limit:
            (part,) = chunk.parts
            assert not pieces[part.piece].splittable
        for part in chunk.parts:
            piece = pieces[part.piece]
            assert piece.splittable or (part.start, part.nbytes) == (0, piece.nbytes)
            assert 0 <= part.chunk_offset <= chunk.nbytes - part.nbytes


@given(extents(), LIMITS)
def test_chunks_are_aligned_in_order_and_apart(pieces: tuple[Extent, ...], limit: int) -> None:
    end = 0
    for chunk in plan_chunks(pieces, limit):
        assert chunk.image_offset % ALIGNMENT_BYTES == 0
        assert chunk.image_offset >= end
        end = chunk.image_offset + chunk.nbytes


@given(st.lists(extents(), max_size=3), LIMITS)
def test_a_staging_buffer_holds_the_largest_chunk_and_is_aligned(images: list[tuple[Extent, ...]], limit: int) -> None:
    size = largest_chunk(images, limit)
    sizes = [chunk.nbytes for pieces in images for chunk in plan_chunks(pieces, limit)]
    assert size % ALIGNMENT_BYTES == 0
    assert max(sizes, default=0) <= size < max(sizes, default=0) + ALIGNMENT_BYTES


def test_small_pieces_share_a_chunk_and_a_large_one_fills_it_up() -> None:
    pieces = (Extent(0, 100), Extent(256, 100), Extent(512, 1000))
    assert plan_chunks(pieces, 1024) == (
        Chunk(0, 1024, (Part(0, 0, 100, 0), Part(1, 0, 100, 256), Part(2, 0, 512, 512))),
        Chunk(1024, 488, (Part(2, 512, 488, 0),)),
    )


def test_a_piece_that_cannot_be_split_begins_a_chunk_rather_than_exceed_one() -> None:
    pieces = (Extent(0, 300), Extent(512, 600, splittable=False), Extent(1280, 2000, splittable=False))
    assert [(chunk.image_offset, chunk.nbytes) for chunk in plan_chunks(pieces, 1024)] == [
        (0, 300),
        (512, 600),
        (1280, 2000),
    ]


def test_a_limit_that_is_no_multiple_of_256_is_rounded_down() -> None:
    assert [chunk.nbytes for chunk in plan_chunks((Extent(0, 1000),), 700)] == [512, 488]


@pytest.mark.parametrize("limit", [-1, 0, 255])
def test_a_chunk_below_256_bytes_is_refused_with_the_number(limit: int) -> None:
    with pytest.raises(ValueError, match=f"at least 256 bytes, not {limit}"):
        plan_chunks((Extent(0, 10),), limit)
