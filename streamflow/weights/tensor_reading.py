"""Tensors from checkpoint files: copies that belong to the caller, and views of the mapping for transfers."""

from __future__ import annotations

import torch

from streamflow.weights.checkpoint_file import CheckpointFile
from streamflow.weights.safetensors_header import TensorEntry
from streamflow.weights.torch_dtypes import torch_dtype


def read_tensor(file: CheckpointFile, entry: TensorEntry) -> torch.Tensor:
    """The tensor, row-major in fresh CPU memory that belongs to the caller. Blocks; for worker threads.

    :raises DtypeUnavailableError: if the installed torch has no such dtype.
    :raises CheckpointClosedError: if the file is closed.
    :raises SourceReadError: if the file shrank or cannot be read.
    """
    tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
    file.pread_into(tensor.data_ptr(), entry.offset_bytes, entry.nbytes)
    return tensor


def view_bytes(file: CheckpointFile, offset: int, nbytes: int) -> torch.Tensor:
    """A flat uint8 view of these bytes of the file's mapping, without a copy, for transfers to read from.

    It keeps the mapping alive: while it lives, closing the file raises. Writing to it, or reading it after somebody
    truncated the file, ends the process with a signal; so it is never handed to a model or a user, who get
    ``read_tensor``.

    :raises CheckpointClosedError: if the file is closed.
    :raises SourceReadError: if the file shrank or cannot be mapped.
    :raises ValueError: if the range is not inside the file.
    """
    buffer = file.map().buffer(offset, nbytes)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(buffer, dtype=torch.uint8)
