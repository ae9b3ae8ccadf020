"""Slices: every byte is brought once, nothing lies beyond the image, and all ranks agree."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.layout import ALIGNMENT_BYTES
from streamflow.stages.ranks.slices import GatherChunk, GatherPlan, Run, cannot_be_cut, clip, plan_clips, plan_gather

SIZES = st.integers(1, 9)
CHUNKS = st.integers(ALIGNMENT_BYTES, 20_000)


def gathered_runs(plan: GatherPlan, size: int) -> list[Run]:
    """The slices of all ranks, in the order of their bytes."""
    return [chunk.slice_of(rank) for chunk in plan.chunks for rank in range(size)]


@given(st.integers(0, 200_000), SIZES, CHUNKS)
def test_every_byte_is_in_one_slice_or_in_the_tail(nbytes: int, size: int, chunk_bytes: int) -> None:
    plan = plan_gather(nbytes, size, chunk_bytes)
    runs = [*gathered_runs(plan, size), Run(plan.tail_offset, plan.tail_bytes)]
    assert [before.end for before in runs[:-1]] == [after.offset for after in runs[1:]]
    assert (runs[0].offset, runs[-1].end) == (0, nbytes)
    assert 0 <= plan.tail_bytes < size * ALIGNMENT_BYTES


@given(st.integers(0, 200_000), SIZES, CHUNKS)
def test_slices_are_aligned_and_not_empty_and_chunks_within_their_bound(
    nbytes: int, size: int, chunk_bytes: int
) -> None:
    plan = plan_gather(nbytes, size, chunk_bytes)
    for run in gathered_runs(plan, size):
        assert run.nbytes > 0
        assert run.offset % ALIGNMENT_BYTES == run.nbytes % ALIGNMENT_BYTES == 0
    bound = max(chunk_bytes, size * ALIGNMENT_BYTES)
    assert all(chunk.slice_bytes * size <= bound for chunk in plan.chunks)
    assert all(before.slice_bytes >= after.slice_bytes for before, after in pairwise(plan.chunks))


@given(st.integers(0, 200_000), SIZES, CHUNKS)
def test_what_the_ranks_copy_is_the_image_and_the_tail_once_more_for_each_other_rank(
    nbytes: int, size: int, chunk_bytes: int
) -> None:
    plan = plan_gather(nbytes, size, chunk_bytes)
    copied = [sum(run.nbytes for run in plan.runs_of(rank)) for rank in range(size)]
    assert set(copied) == {plan.copied_bytes}
    assert sum(copied) == nbytes + (size - 1) * plan.tail_bytes


def test_an_image_smaller_than_the_ranks_is_all_tail() -> None:
    assert plan_gather(768, 4, 1 << 20) == GatherPlan((), 0, 768)
    assert plan_gather(0, 4, 1 << 20) == GatherPlan((), 0, 0)


def test_chunks_of_two_ranks() -> None:
    plan = plan_gather(2048 + 512 + 256, 2, 1300)
    assert plan == GatherPlan((GatherChunk(0, 512), GatherChunk(1024, 512), GatherChunk(2048, 256)), 2560, 256)
    assert plan.runs_of(1) == (Run(512, 512), Run(1536, 512), Run(2304, 256), Run(2560, 256))


@pytest.mark.parametrize(("nbytes", "size", "chunk_bytes"), [(1, 0, 256), (-1, 2, 256), (1, 2, 255)])
def test_what_cannot_be_cut_is_refused(nbytes: int, size: int, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut for"):
        plan_gather(nbytes, size, chunk_bytes)


# What of the pieces a rank packs


@attrs.frozen
class ToyPiece:
    offset_bytes: int
    nbytes: int
    splittable: bool = True


@attrs.frozen
class ToyImage:
    name: str
    pieces: tuple[ToyPiece, ...]


@st.composite
def toy_pieces(draw: st.DrawFn) -> list[ToyPiece]:
    pieces, offset = [], 0
    for nbytes, hole in draw(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 600)), max_size=6)):
        pieces.append(ToyPiece(offset, nbytes))
        offset += nbytes + hole
    return pieces


@given(toy_pieces(), st.integers(0, 5000), st.integers(0, 5000), st.integers(256, 2000))
def test_packing_a_run_reads_what_of_the_pieces_lies_in_it_once(
    pieces: list[ToyPiece], offset: int, nbytes: int, chunk_bytes: int
) -> None:
    run = Run(offset, nbytes)
    (clips,) = clip(pieces, [run])
    packed: list[int] = []
    for chunk in plan_clips(clips, chunk_bytes):
        assert chunk.nbytes <= chunk_bytes
        assert run.offset <= chunk.image_offset
        assert chunk.image_offset + chunk.nbytes <= run.end
        for part in chunk.parts:
            place = chunk.image_offset + part.chunk_offset
            assert place == pieces[part.piece].offset_bytes + part.start
            assert part.start + part.nbytes <= pieces[part.piece].nbytes
            packed += range(place, place + part.nbytes)
    in_pieces = {byte for piece in pieces for byte in range(piece.offset_bytes, piece.offset_bytes + piece.nbytes)}
    assert packed == sorted(in_pieces & set(range(run.offset, run.end)))


@given(toy_pieces(), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=4))
def test_clips_are_what_runs_and_pieces_have_in_common(pieces: list[ToyPiece], extents: list[tuple[int, int]]) -> None:
    runs = [Run(offset, nbytes) for offset, nbytes in extents]
    for run, clips in zip(runs, clip(pieces, runs), strict=True):
        assert [(c.piece, c.offset_bytes, c.nbytes) for c in clips] == [
            (index, max(run.offset, piece.offset_bytes), length)
            for index, piece in enumerate(pieces)
            if (length := min(run.end, piece.offset_bytes + piece.nbytes) - max(run.offset, piece.offset_bytes)) > 0
        ]
        assert all(c.start == c.offset_bytes - pieces[c.piece].offset_bytes for c in clips)


def test_images_whose_pieces_cannot_be_cut_are_named() -> None:
    whole = ToyImage("block 7", (ToyPiece(0, 10), ToyPiece(256, 10, splittable=False)))
    assert cannot_be_cut([ToyImage("block 6", (ToyPiece(0, 10),)), whole, ToyImage("empty", ())]) == {"block 7"}
