"""Row-major and overlapping layouts, against torch and against counting."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from streamflow.weights.strides import is_overlapping, is_row_major

LAYOUTS = st.integers(0, 4).flatmap(
    lambda dims: st.tuples(
        st.lists(st.integers(0, 4), min_size=dims, max_size=dims),
        st.lists(st.integers(0, 9), min_size=dims, max_size=dims),
    )
)


@given(LAYOUTS)
def test_row_major_is_what_torch_calls_contiguous(layout: tuple[list[int], list[int]]) -> None:
    shape, stride = layout
    assert is_row_major(shape, stride) == torch.empty_strided(shape, stride).is_contiguous()


@given(st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=False))
def test_permuted_tensors_do_not_overlap(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.empty(shape).permute(order)
    assert not is_overlapping(tensor.shape, tensor.stride())
    assert is_row_major(tensor.shape, tensor.stride()) == tensor.is_contiguous()


@given(LAYOUTS)
def test_no_overlap_is_missed(layout: tuple[list[int], list[int]]) -> None:
    shape, stride = layout
    places = [0]
    for size, step in zip(shape, stride, strict=True):
        places = [place + i * step for place in places for i in range(size)]
    if len(set(places)) < len(places):
        assert is_overlapping(shape, stride)


def test_expanded_tensors_overlap_and_sliced_ones_do_not() -> None:
    assert is_overlapping((3, 4), (0, 1))
    assert is_overlapping((3, 3), (1, 1))
    assert not is_overlapping((3, 4), (10, 2))
    assert not is_overlapping((1, 4), (0, 1))
    assert not is_overlapping((0, 4), (0, 0))
