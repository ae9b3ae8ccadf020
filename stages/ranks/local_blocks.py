"""Which blocks each rank had better fetch whole, instead of a slice of them. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Mapping


def choose_local(
    blocks: Mapping[str, int],
    *,
    link_bytes_per_s: float,
    gather_bytes_per_s: float,
    gather_latency_s: float,
    size: int,
) -> frozenset[str]:
    """The names of those of ``blocks`` (bytes by name) that are there no later if every rank copies them whole.

    Gathered, a block takes as long as its slice on the host link or its gather on the device link, whichever is longer:
    they overlap from block to block. ``gather_bytes_per_s``: of the whole image, from all ranks together.
    ``gather_latency_s``: what a gather takes whatever its size. Ranks that are given the same numbers choose the same;
    measured ones have to be agreed on first.

    :raises ValueError: if a rate is not above 0, the latency or a size of a block below 0, or ``size`` below 1.
    """
    if not (link_bytes_per_s > 0 and gather_bytes_per_s > 0 and gather_latency_s >= 0 and size >= 1):
        raise ValueError(
            f"rates must be above 0, a latency not below 0 and ranks at least 1; given are {link_bytes_per_s} and "
            f"{gather_bytes_per_s} bytes/s, {gather_latency_s} s and {size} ranks"
        )
    below = sorted(name for name, nbytes in blocks.items() if nbytes < 0)
    if below:
        raise ValueError(f"blocks with fewer than 0 bytes: {', '.join(below)}")

    def is_local(nbytes: int) -> bool:
        whole_s = nbytes / link_bytes_per_s
        return whole_s <= max(whole_s / size, gather_latency_s + nbytes / gather_bytes_per_s)

    return frozenset(name for name, nbytes in blocks.items() if is_local(nbytes))
