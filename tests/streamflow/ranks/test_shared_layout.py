"""Where images lie in a shared copy, which rank packs what, and which ranks can share one at all."""

from __future__ import annotations

import itertools
import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.ranks.shared_layout import IMAGE_ALIGNMENT_BYTES, lay_out, parts_between, share_of
from streamflow.ranks.shared_plan import describe_image, why_not_together
from streamflow.stages.layout import TensorSpec, plan_layout
from streamflow.store import packing

#: Offset in its image and size of the pieces of each image.
Pieces = list[list[tuple[int, int]]]


@st.composite
def pieces_of_images(draw: st.DrawFn) -> Pieces:
    images: Pieces = []
    for _ in range(draw(st.integers(0, 4))):
        end, pieces = 0, []
        for gap, nbytes in draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200_000)), max_size=3)):
            pieces.append((end + gap, nbytes))
            end += gap + nbytes
        images.append(pieces)
    return images


def size_of(pieces: list[tuple[int, int]]) -> int:
    return max((offset + nbytes for offset, nbytes in pieces), default=0)


@given(pieces_of_images(), st.integers(1, 5), st.integers(10_000, 100_000))
def test_every_byte_of_every_piece_is_packed_by_one_rank(pieces: Pieces, size: int, max_bytes: int) -> None:
    layout = lay_out([size_of(each) for each in pieces])
    packed: list[tuple[int, int]] = []
    for rank in range(size):
        start, end = share_of(rank, size, layout.nbytes)
        for part in parts_between(pieces, layout, start, end, max_bytes=max_bytes):
            offset, nbytes = pieces[part.image][part.piece]
            assert start <= part.offset < part.offset + part.nbytes <= end
            assert part.offset == layout.offsets[part.image] + offset + part.start
            assert 0 < part.nbytes <= max_bytes
            assert part.start + part.nbytes <= nbytes
            packed.append((part.offset, part.nbytes))
    wanted = [
        (base + offset, nbytes) for base, each in zip(layout.offsets, pieces, strict=True) for offset, nbytes in each
    ]
    assert runs(packed) == runs(wanted)


def runs(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Start and end of the runs that they make up; none may overlap another."""
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted(extents):
        assert not found or start >= found[-1][1]
        if found and start == found[-1][1]:
            found[-1] = (found[-1][0], start + nbytes)
        else:
            found.append((start, start + nbytes))
    return found


@given(st.integers(0, 10_000_000), st.integers(1, 9))
def test_the_ranks_parts_follow_each_other_and_are_about_equal(nbytes: int, size: int) -> None:
    shares = [share_of(rank, size, nbytes) for rank in range(size)]
    assert (shares[0][0], shares[-1][1]) == (0, nbytes)
    for (_, end), (start, _) in itertools.pairwise(shares):
        assert end == start
        assert start % IMAGE_ALIGNMENT_BYTES == 0 or start == nbytes
    sizes = [end - start for start, end in shares]
    assert max(sizes) - min(sizes) <= 2 * IMAGE_ALIGNMENT_BYTES


@given(st.lists(st.integers(0, 1_000_000)))
def test_images_are_aligned_and_apart(sizes: list[int]) -> None:
    layout = lay_out(sizes)
    assert all(offset % IMAGE_ALIGNMENT_BYTES == 0 for offset in layout.offsets)
    ends = [offset + size for offset, size in zip(layout.offsets, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, (*layout.offsets[1:], layout.nbytes), strict=False))
    assert layout.nbytes % IMAGE_ALIGNMENT_BYTES == 0


def test_images_are_aligned_as_in_the_files_of_the_store() -> None:
    assert IMAGE_ALIGNMENT_BYTES == packing.IMAGE_ALIGNMENT_BYTES


# Which ranks can share

SPEC = TensorSpec("weight", "float32", (4, 4), (4, 1))


def plan(*blocks: TensorSpec, **where: Any) -> Any:
    images = [describe_image(f"blocks.{index}", plan_layout([spec])) for index, spec in enumerate(blocks)]
    told = {"where": {"machine": "here", "user": 0, **where}, "images": images}
    return json.loads(json.dumps(told))


@pytest.mark.parametrize("storage", [None, 7])
def test_ranks_with_the_same_images_share_wherever_their_own_tensors_lie(storage: int | None) -> None:
    elsewhere = attrs.evolve(SPEC, storage=storage, storage_offset_bytes=64 if storage else 0)
    assert why_not_together([plan(SPEC, SPEC), plan(SPEC, elsewhere)]) is None


@pytest.mark.parametrize(
    "change", [{"name": "bias"}, {"dtype": "int32"}, {"shape": (2, 8)}, {"stride": (1, 4)}], ids=str
)
def test_the_block_that_is_another_is_named(change: dict[str, Any]) -> None:
    other = attrs.evolve(SPEC, **change)
    refusal = why_not_together([plan(SPEC, SPEC), plan(SPEC, SPEC), plan(SPEC, other)])
    assert refusal is not None
    assert (refusal.rank, refusal.details) == (2, {"rank": 2, "block": "blocks.1", "tensor": None})


def test_another_number_of_blocks_names_none() -> None:
    refusal = why_not_together([plan(SPEC), plan(SPEC, SPEC)])
    assert refusal is not None
    assert refusal.details == {"rank": 1, "block": None, "tensor": None}


@pytest.mark.parametrize(("what", "value"), [("machine", "there"), ("user", 5)])
def test_ranks_of_different_places_are_told_where_they_are(what: str, value: Any) -> None:
    refusal = why_not_together([plan(SPEC), plan(SPEC, **{what: value})])
    assert refusal is not None
    assert (refusal.rank, refusal.details) == (1, None)
    assert what in refusal.reason
    assert str(value) in refusal.reason
