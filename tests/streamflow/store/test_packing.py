"""Where images lie: aligned, whole, in files no larger than allowed, under headers that our strict reader accepts."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from streamflow.store.draft import StoredImage, StoredTensor
from streamflow.store.errors import UnsupportedTensorError
from streamflow.store.packing import IMAGE_ALIGNMENT_BYTES, PAD_PREFIX, EntryPlan, plan_entry, plan_groups
from streamflow.weights.safetensors_header import LENGTH_BYTES, parse_header

_SIZES = st.integers(0, 1200)


@st.composite
def image_lists(draw: st.DrawFn) -> list[StoredImage]:
    """Images of tensors with any holes between them, empty ones, and images without any."""
    images = []
    for index in range(draw(st.integers(1, 6))):
        tensors, end = [], 0
        for number in range(draw(st.integers(0, 4))):
            end += draw(st.integers(0, 300))
            size = draw(_SIZES)
            tensors.append(StoredTensor(f"i{index}.t{number}", "parameter", "int8", (size,), (1,), end))
            end += size
        order = draw(st.permutations(tensors))
        nbytes = end + draw(st.sampled_from([0, 1, 255, 70_000]))
        images.append(StoredImage(f"i{index}", "block", nbytes, tuple(order)))
    return images


limits = st.sampled_from([1, 100_000, 140_000, 200_000, 1 << 30])


@given(images=image_lists(), limit=limits)
def test_every_image_lies_whole_and_aligned_and_apart(images: list[StoredImage], limit: int) -> None:
    plan = plan_entry(images, limit)
    ends = [len(file.header) for file in plan.files]
    for image, place in zip(images, plan.places, strict=True):
        assert place.nbytes == image.nbytes
        assert place.offset_bytes % IMAGE_ALIGNMENT_BYTES == 0
        assert place.offset_bytes >= ends[place.file]
        ends[place.file] = place.offset_bytes + place.nbytes
    assert ends == [file.nbytes for file in plan.files]


@given(images=image_lists(), limit=limits)
def test_headers_are_legal_and_every_tensor_lies_at_its_offset(images: list[StoredImage], limit: int) -> None:
    plan = plan_entry(images, limit)
    pads: set[str] = set()
    for file in plan.files:
        header = parse_header(file.name, file.header[LENGTH_BYTES:], file.nbytes)
        assert header.metadata == {"format": "pt"}
        mine = {name for name in header.entries if name.startswith(PAD_PREFIX)}
        assert not mine & pads
        pads |= mine
        assert header.entries.keys() - mine == {t.name for i in file.images for t in images[i].tensors}
        for index in file.images:
            for tensor in images[index].tensors:
                assert header.entries[tensor.name].nbytes == tensor.shape[0]
                if tensor.shape[0]:
                    place = plan.places[index]
                    assert header.entries[tensor.name].offset_bytes == place.offset_bytes + tensor.offset_bytes


@given(images=image_lists(), limit=limits)
def test_only_a_file_of_one_image_is_larger_than_the_limit(images: list[StoredImage], limit: int) -> None:
    plan = plan_entry(images, limit)
    for file in plan.files:
        assert file.images
        assert file.nbytes <= limit or len(file.images) == 1
    assert [index for file in plan.files for index in file.images] == list(range(len(images)))


@given(images=image_lists(), limit=limits)
def test_no_file_ends_before_the_next_image_would_be_too_much(images: list[StoredImage], limit: int) -> None:
    plan = plan_entry(images, limit)
    for before, after in zip(plan.files, plan.files[1:], strict=False):
        together = plan_groups(images, [[*before.images, after.images[0]]])
        assert together.files[0].nbytes > limit


@given(images=image_lists(), limit=limits)
def test_the_plan_follows_from_which_image_is_in_which_file(images: list[StoredImage], limit: int) -> None:
    plan = plan_entry(images, limit)
    assert plan_groups(images, [file.images for file in plan.files]) == plan


def entry(*tensors: StoredTensor, nbytes: int = 100) -> EntryPlan:
    return plan_entry([StoredImage("block", "block", nbytes, tensors)], 1 << 30)


def test_tensors_that_share_bytes_are_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="shares bytes of the image block"):
        entry(
            StoredTensor("a", "parameter", "int8", (10,), (1,), 0), StoredTensor("b", "buffer", "int8", (10,), (1,), 9)
        )


def test_a_tensor_beyond_its_image_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="reaches beyond the 100 bytes"):
        entry(StoredTensor("a", "parameter", "int8", (10,), (1,), 91))
