"""Whether this rank's tensors are what lies in the ranks' shared copy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from streamflow.ranks.shared_layout import Part
from streamflow.stages.dtypes import DTYPE_BYTES
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import BlockImage, MemoryPiece
from streamflow.stages.layout import Region, TensorView

#: Puts bytes of the copy, from an offset on, at an address: ``read(address, offset, nbytes)``.
ReadCopy = Callable[[int, int, int], None]

_memcmp = ctypes.CDLL(None).memcmp  # other Python threads run meanwhile
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def differing_tensor(image: BlockImage, part: Part, copy_address: int, read: ReadCopy) -> str | None:
    """The name of a tensor whose elements in this part differ, bit by bit, from the copy's; None if none does.

    ``image`` is over the tensors themselves; ``copy_address`` is where the copy begins. What lies between the elements
    of a tensor with holes is nobody's. Blocks; for worker threads.
    """
    piece = image.pieces[part.piece]
    if not isinstance(piece, MemoryPiece):
        raise TypeError(f"{image.name} is not in memory")
    if _memcmp(piece.data.data_ptr() + part.start, copy_address + part.offset, part.nbytes) == 0:
        return None
    region = [region for region in image.layout.regions if region.nbytes][part.piece]
    copied = allocate_host(part.nbytes)
    read(copied.data_ptr(), part.offset, part.nbytes)
    end = part.start + part.nbytes
    differs = torch.zeros(region.nbytes, dtype=torch.bool, device="cpu")
    differs[part.start : end] = piece.data[part.start : end] != copied
    for view in image.layout.views:
        if view.name in region.names and bool(bytes_of_view(view, region, differs).any()):
            return view.name
    return None


def bytes_of_view(view: TensorView, region: Region, memory: torch.Tensor) -> torch.Tensor:
    """What ``memory``, which has an element for each byte of the region, has for the bytes of a tensor's elements."""
    size = DTYPE_BYTES[view.dtype]
    stride = [size * step for step in view.stride]
    return memory.as_strided((*view.shape, size), (*stride, 1), view.offset_bytes - region.offset_bytes)
