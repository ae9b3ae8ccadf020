"""Weights in memory that nothing can be written to: a copy back to the host is a fault of the process."""

from __future__ import annotations

import mmap
import tempfile
import warnings

import torch
from torch import nn

from tests.streamflow.kit import ALIGNMENT, aligned, bytes_of


def in_read_only_memory(module: nn.Module) -> mmap.mmap:
    """Put the module's floating-point tensors into a read-only mapping, which this returns."""
    tensors = list({id(t): t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}.values())
    starts = [sum(aligned(tensor.nbytes) for tensor in tensors[:index]) for index in range(len(tensors))]
    mapping = _mapped([(start, bytes_of(tensor)) for start, tensor in zip(starts, tensors, strict=True)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that the memory cannot be written to
        flat = torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
    for start, tensor in zip(starts, tensors, strict=True):
        tensor.data = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return mapping


def _mapped(parts: list[tuple[int, bytes]]) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        for start, data in parts:
            file.seek(start)
            file.write(data)
        file.truncate(max(start + len(data) for start, data in parts) + ALIGNMENT)
        file.flush()
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
