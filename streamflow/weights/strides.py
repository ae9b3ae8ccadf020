"""Questions about shapes and strides, in elements. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements lie one after another in index order (strides of single elements do not count)."""
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and found != step:
            return 0 in shape
        step *= size
    return True


def is_overlapping(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements may share memory, as in an expanded tensor; False only where it is certain."""
    if 0 in shape:
        return False
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
