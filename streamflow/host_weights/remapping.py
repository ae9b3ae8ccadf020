"""Letting a loaded model share the entry's memory: its tensors show a mapping, and its private copies go.

The mapping is private and copy-on-write. What is only read is the page cache's, as in every other process that maps the
entry; a write, should anybody make one once the model is no longer streamed, gets a page of its own and never reaches
the file. So the model stays an ordinary one when its offload has closed: the mapping lives as long as its tensors do.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterable, Iterator, Mapping

import torch

from streamflow.binding.inventory import Inventory, OwnedTensor
from streamflow.host_weights.ownership import Ownership
from streamflow.stages.images import view_of
from streamflow.stages.layout import ImageLayout
from streamflow.store.errors import disk_errors
from streamflow.store.lease import Lease

_MAP_NORESERVE = 0x4000  # Linux; the module has no name for it in every version of Python


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
    """All of a file, mapped copy-on-write for as long as anything holds the memory; the descriptor may be closed.

    :raises OSError: if it cannot be mapped.
    """
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return memoryview(mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))
