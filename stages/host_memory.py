"""Host memory of exact size: whole pages from the system, so that page-locking neither rounds up nor shares a page."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

_HUGE_PAGE_BYTES = 2 << 20


def page_align(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def allocate_host(nbytes: int) -> torch.Tensor:
    """A flat uint8 CPU tensor of ``nbytes`` on pages of its own, zeroed; given back when the last view goes.

    :raises MemoryError: if the system has not that much.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        pages = mmap.mmap(-1, page_align(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as failure:
        raise MemoryError(f"{nbytes:,} bytes of host memory could not be had: {failure}") from failure
    if nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)  # first touch is then a fault for 2 MiB, not for 4 KiB
    # the memoryview lets the tensor keep the mapping alive; nothing ever closes it by hand
    return torch.frombuffer(memoryview(pages), dtype=torch.uint8, count=nbytes)
