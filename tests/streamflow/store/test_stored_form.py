"""The row-major form of a strided tensor, against torch's own permute."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from streamflow.store.draft import StoredTensor
from streamflow.store.errors import StoreCode, UnsupportedTensorError
from streamflow.store.stored_form import stored_form


def described(tensor: torch.Tensor) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor("weight", "parameter", dtype, tuple(tensor.shape), tensor.stride(), 0)


shapes = st.lists(st.integers(0, 4), max_size=5)


@given(shape=shapes, order=st.randoms(use_true_random=False))
def test_a_permuted_tensor_comes_back_from_its_bytes(shape: list[int], order: object) -> None:
    permutation = list(range(len(shape)))
    order.shuffle(permutation)  # type: ignore[attr-defined]
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).permute(permutation)
    form = stored_form(described(tensor))
    in_memory = torch.as_strided(tensor, (tensor.numel(),), (1,), 0)
    assert form.nbytes == tensor.numel() * 8
    assert torch.equal(in_memory.reshape(form.shape).permute(form.permutation), tensor)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3).expand(2, 3), torch.zeros(4, 4)[:, :2], torch.zeros(9).as_strided((3, 3), (2, 1))],
    ids=["expanded", "holes", "overlapping"],
)
def test_elements_that_overlap_or_leave_holes_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"weight: the strides .*contiguous") as caught:
        stored_form(described(tensor))
    assert caught.value.code is StoreCode.UNSUPPORTED_TENSOR
    assert not caught.value.is_retryable


@pytest.mark.parametrize("dtype", ["complex128", "complex32"])
def test_a_dtype_that_the_format_has_not_is_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=dtype):
        stored_form(StoredTensor("weight", "buffer", dtype, (2,), (1,), 0))


def test_packed_elements_are_counted_as_the_format_does() -> None:
    tensor = StoredTensor("weight", "parameter", "float4_e2m1fn_x2", (3, 4), (1, 3), 0)
    form = stored_form(tensor)
    assert (form.shape, form.file_shape, form.permutation, form.nbytes) == ((4, 3), (4, 6), (1, 0), 12)
    with pytest.raises(UnsupportedTensorError, match="groups of 2"):
        stored_form(StoredTensor("weight", "parameter", "float4_e2m1fn_x2", (), (), 0))
