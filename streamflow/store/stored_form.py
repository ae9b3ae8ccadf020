"""The row-major form in which a strided tensor lies in a file, and how to get the tensor back. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import attrs

from streamflow.stages.dtypes import DTYPE_BYTES
from streamflow.store.draft import StoredTensor
from streamflow.store.errors import UnsupportedTensorError
from streamflow.weights.safetensors_dtypes import FILE_DTYPES, TORCH_TO_FILE
from streamflow.weights.strides import is_row_major


@attrs.frozen
class StoredForm:
    """How a tensor is written: ``tensor = stored.permute(permutation)``, where ``stored`` has ``shape``, row by row.

    ``file_shape`` counts elements as the file format does (two ``F4`` to a byte); the others count torch's.
    """

    file_dtype: str
    shape: tuple[int, ...]
    file_shape: tuple[int, ...]
    permutation: tuple[int, ...]
    nbytes: int


def stored_form(tensor: StoredTensor) -> StoredForm:
    """The form of a dense tensor, whatever the order of its dimensions in memory.

    :raises UnsupportedTensorError: if the file format has no such dtype, elements overlap, or there are holes.
    """
    try:
        return _form(tensor.dtype, tensor.shape, tensor.stride)
    except _NoFormError as failure:
        raise UnsupportedTensorError(tensor.name, str(failure)) from None


class _NoFormError(Exception):
    """Why a tensor has no such form."""


@lru_cache(maxsize=4096)  # a model has thousands of tensors, and few kinds of them
def _form(dtype: str, elements: tuple[int, ...], stride: tuple[int, ...]) -> StoredForm:
    file_dtype = TORCH_TO_FILE.get(dtype)
    if file_dtype is None:
        raise _NoFormError(f"safetensors files cannot hold {dtype}")
    outer_first = _outer_first(elements, stride)
    shape = tuple(elements[dim] for dim in outer_first)
    if not is_row_major(shape, [stride[dim] for dim in outer_first]):
        raise _NoFormError(
            f"the strides {list(stride)} of its shape {list(elements)} lay elements over each other "
            "or leave holes between them (call .contiguous() on it before publishing)",
        )
    permutation = tuple(outer_first.index(dim) for dim in range(len(shape)))
    file_shape = _in_file_elements(file_dtype, shape)
    return StoredForm(file_dtype, shape, file_shape, permutation, math.prod(shape) * DTYPE_BYTES[dtype])


def _outer_first(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions as they lie in memory, slowest first; strides of single elements say nothing."""
    dims = list(range(len(shape)))
    if is_row_major(shape, stride):
        return dims
    return sorted(dims, key=lambda dim: (shape[dim] > 1, -stride[dim]))


def _in_file_elements(file_dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    packed = FILE_DTYPES[file_dtype].packed
    if packed == 1:
        return shape
    if not shape:
        raise _NoFormError(f"{file_dtype} is held in groups of {packed}, which a single element is not")
    return (*shape[:-1], shape[-1] * packed)
