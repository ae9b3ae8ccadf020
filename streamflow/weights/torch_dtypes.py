"""Element types by name, as the installed torch has them."""

from __future__ import annotations

import torch

from streamflow.weights.errors import DtypeUnavailableError


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls ``name`` (``"bfloat16"``).

    :raises DtypeUnavailableError: if the installed torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DtypeUnavailableError(name, torch.__version__)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls ``dtype``, without the ``torch.`` prefix."""
    return str(dtype).removeprefix("torch.")


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, as uint8 if its elements have one byte: torch can move those whatever they stand for."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
