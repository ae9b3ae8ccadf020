"""Where tensors lie in a block image: apart, aligned, with their strides, and aliases still aliases."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.dtypes import DTYPE_BYTES
from streamflow.stages.layout import ALIGNMENT_BYTES, TensorSpec, align_up, contiguous_stride, plan_layout

SIZES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn, name: str = "t") -> TensorSpec:
    """A tensor of any dtype, permuted, sliced, expanded, zero-dimensional or empty, alone or in one of two storages."""
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = draw(SIZES)
    stride = draw(st.permutations(contiguous_stride(shape)))
    if draw(st.booleans()):
        stride = [step * draw(st.sampled_from([0, 1, 3])) for step in stride]
    storage = draw(st.sampled_from([None, "a", "b"]))
    offset = draw(st.integers(0, 40)) * DTYPE_BYTES[dtype]
    return TensorSpec(name, dtype, shape, tuple(stride), storage, offset)


BLOCKS = st.lists(specs(), max_size=8).map(
    lambda drawn: [attrs.evolve(spec, name=f"t{index}") for index, spec in enumerate(drawn)]
)


def shares_bytes(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether both are views of one storage and their spans overlap there."""
    if one.storage is None or one.storage != other.storage:
        return False
    start = max(one.storage_offset_bytes, other.storage_offset_bytes)
    ends = (spec.storage_offset_bytes + spec.span_bytes for spec in (one, other))
    return start < min(ends) and 0 not in (one.span_bytes, other.span_bytes)


@given(BLOCKS)
def test_tensors_keep_name_dtype_shape_and_strides_in_the_order_given(block: list[TensorSpec]) -> None:
    views = plan_layout(block).views
    assert [(v.name, v.dtype, v.shape, v.stride) for v in views] == [
        (s.name, s.dtype, s.shape, s.stride) for s in block
    ]


@given(BLOCKS)
def test_tensors_lie_inside_the_image_and_apart_unless_they_share_bytes_in_their_storage(
    block: list[TensorSpec],
) -> None:
    layout = plan_layout(block)
    spans = [(v.offset_bytes, v.offset_bytes + s.span_bytes) for v, s in zip(layout.views, block, strict=True)]
    for i, (start, end) in enumerate(spans):
        assert 0 <= start <= end <= layout.nbytes
        for j, (other_start, other_end) in enumerate(spans[:i]):
            overlap = max(start, other_start) < min(end, other_end)
            assert overlap == shares_bytes(block[i], block[j])
            if overlap:
                assert start - other_start == block[i].storage_offset_bytes - block[j].storage_offset_bytes


@given(BLOCKS)
def test_each_tensor_is_aligned_to_its_elements_and_to_256_bytes_where_it_shares_with_none(
    block: list[TensorSpec],
) -> None:
    layout = plan_layout(block)
    alone = {region.names[0] for region in layout.regions if len(region.names) == 1}
    for view in layout.views:
        alignment = ALIGNMENT_BYTES if view.name in alone else DTYPE_BYTES[view.dtype]
        assert view.offset_bytes % alignment == 0


@given(BLOCKS)
def test_a_region_names_the_bytes_of_the_storage_that_its_tensors_lie_in(block: list[TensorSpec]) -> None:
    layout = plan_layout(block)
    specs_by_name = {spec.name: spec for spec in block}
    views = {view.name: view for view in layout.views}
    for region in layout.regions:
        assert region.storage_start_bytes >= 0
        for name in region.names:
            spec, into = specs_by_name[name], views[name].offset_bytes - region.offset_bytes
            assert spec.storage == region.storage
            assert spec.storage_offset_bytes == region.storage_start_bytes + into
            assert into + spec.span_bytes <= region.nbytes


@given(BLOCKS)
def test_regions_are_aligned_apart_and_hold_each_tensor_once(block: list[TensorSpec]) -> None:
    layout = plan_layout(block)
    assert layout.nbytes % ALIGNMENT_BYTES == 0
    end = 0
    for region in layout.regions:
        assert region.offset_bytes % ALIGNMENT_BYTES == 0
        assert end <= region.offset_bytes < end + ALIGNMENT_BYTES
        end = region.offset_bytes + region.nbytes
    assert end <= layout.nbytes < end + ALIGNMENT_BYTES
    assert sorted(name for region in layout.regions for name in region.names) == sorted(s.name for s in block)


@given(BLOCKS)
def test_the_same_tensors_have_the_same_layout(block: list[TensorSpec]) -> None:
    assert plan_layout(block) == plan_layout(iter(block))


def test_a_block_without_tensors_has_no_bytes() -> None:
    layout = plan_layout([])
    assert (layout.views, layout.regions, layout.nbytes) == ((), (), 0)


def test_views_of_one_storage_that_do_not_overlap_lie_apart_and_those_that_touch_too() -> None:
    halves = [TensorSpec(name, "float32", (2,), (1,), "weights", 8 * i) for i, name in enumerate(("low", "high"))]
    assert [view.offset_bytes for view in plan_layout(halves).views] == [0, 256]


def test_a_chain_of_overlapping_views_is_one_region_whatever_their_order() -> None:
    chain = [TensorSpec(f"t{i}", "uint8", (10,), (1,), "s", 8 * i) for i in (2, 0, 1)]
    layout = plan_layout([*chain, TensorSpec("other", "uint8", (1,), (1,), "s", 100)])
    assert [(r.nbytes, r.storage_start_bytes, r.names) for r in layout.regions] == [
        (26, 0, ("t0", "t1", "t2")),
        (1, 100, ("other",)),
    ]
    assert [view.offset_bytes for view in layout.views] == [16, 0, 8, 256]


def test_a_view_of_wider_elements_stays_aligned_when_bytes_before_it_belong_to_the_region() -> None:
    layout = plan_layout(
        [
            TensorSpec("packed", "uint8", (10,), (1,), "s", 1),
            TensorSpec("scales", "float32", (2,), (1,), "s", 4),
        ]
    )
    assert [view.offset_bytes for view in layout.views] == [1, 4]
    assert (layout.regions[0].storage_start_bytes, layout.regions[0].nbytes) == (0, 12)


def test_names_that_come_twice_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"must be distinct.*repeated: \['w'\]"):
        plan_layout([TensorSpec("w", "uint8", (1,), (1,)), TensorSpec("w", "uint8", (2,), (1,))])


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 256), (256, 256), (257, 512)])
def test_align_up(value: int, expected: int) -> None:
    assert align_up(value) == expected


@pytest.mark.parametrize(
    ("shape", "stride", "span"),
    [
        ((), (), 4),
        ((3, 2), (2, 1), 24),
        ((3, 2), (1, 3), 24),
        ((3, 2), (0, 1), 8),
        ((2, 3), (10, 2), 60),
        ((0, 5), (5, 1), 0),
    ],
)
def test_the_span_of_a_tensor_ends_with_its_last_element(
    shape: tuple[int, ...], stride: tuple[int, ...], span: int
) -> None:
    assert TensorSpec("t", "float32", shape, stride).span_bytes == span
