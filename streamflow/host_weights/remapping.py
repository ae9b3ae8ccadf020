"""Letting a loaded model share the entry's memory: its tensors show a mapping, and its private copies go.

The mapping is private and copy-on-write. What is only read is the page cache's, as in every other process that maps the
entry; a write, should anybody make one once the model is no longer streamed, gets a page of its own and never reaches
the file. So the model stays an ordinary one when its offload has closed: the mapping lives as long as its tensors do.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping

import torch

from streamflow.binding.inventory import Inventory, OwnedTensor
from streamflow.host_weights.ownership import Ownership
from streamflow.stages.images import view_of
from streamflow.stages.layout import ImageLayout
from streamflow.store.errors import disk_errors
from streamflow.store.lease import Lease
from streamflow.weights.file_mapping import address_of

# Linux; the module has no name for them in every version of Python
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10


def remap(inventory: Inventory, ownership: Ownership, lease: Lease) -> None:
    """Point every tensor of the model at the entry's bytes; Parameter objects keep their identity and attributes.

    Nothing is changed if this raises. Blocks; for worker threads.

    :raises StoreOperationError: if a file cannot be mapped.
    """
    with disk_errors("mapping an entry", lease.path):
        views = dict(_views(ownership, lease))
    show((*inventory.fixed, *(owned for block in inventory.blocks for owned in block.tensors)), views)


def show(tensors: Iterable[OwnedTensor], views: Mapping[str, torch.Tensor]) -> None:
    """Point each tensor at the view of its name; nothing is changed if one has none."""
    pairs = [(owned, views[owned.name]) for owned in tensors]
    with torch.inference_mode(False), torch.no_grad():
        for owned, view in pairs:
            owned.tensor.data = view


def give_memory_back() -> None:
    """Let the system have what the private copies took. Slow; for startup alone. Blocks."""
    gc.collect(1)  # not the oldest generation: that keeps the interpreter, and with it the loop, for up to a second
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _views(ownership: Ownership, lease: Lease) -> Iterator[tuple[str, torch.Tensor]]:
    maps: dict[int, memoryview] = {}
    for index, layout in enumerate(ownership.layouts):
        place = lease.place(index)
        if place.file not in maps:
            maps[place.file] = private_mapping(lease.fileno(place.file))
        yield from views_of_image(layout, maps[place.file][place.offset_bytes : place.offset_bytes + place.nbytes])


def views_of_image(layout: ImageLayout, memory: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """The name of each tensor of an image, and the tensor, over ``memory``, which it keeps alive."""
    flat = torch.frombuffer(memory, dtype=torch.uint8) if layout.nbytes else torch.empty(0, dtype=torch.uint8)
    for view in layout.views:
        yield view.name, view_of(flat, view)


def private_mapping(fd: int) -> memoryview:
    """All of a file, mapped copy-on-write for as long as anything holds the memory; the descriptor may be closed, and
    no other one is kept.

    :raises OSError: if it cannot be mapped.
    """
    nbytes = os.fstat(fd).st_size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    pages = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    # Python's mapping of a file keeps a duplicate of the descriptor; so the file takes the place of memory without one
    _map_at(address_of(pages), nbytes, fd)
    return memoryview(pages)


def _map_at(address: int, nbytes: int, fd: int) -> None:
    libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
    if libc_mmap(address, nbytes, prot, flags, fd, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
