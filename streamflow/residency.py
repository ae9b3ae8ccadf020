"""Choosing the blocks that stay on the device. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Sequence


def choose_residents(
    block_bytes: Sequence[int],
    eligible: Sequence[bool],
    *,
    count: int | None,
    budget_bytes: int | None,
    spread: bool,
) -> tuple[int, ...]:
    """The resident blocks, ascending: at most ``count`` and at most ``budget_bytes`` together, eligible ones only.

    ``count`` None: as many as the budget allows, or none where there is no budget either. ``spread`` puts them evenly
    over the eligible blocks, the others take the first. Where the budget does not hold the chosen number, fewer are
    chosen, in the same manner.
    """
    candidates = [block for block, allowed in enumerate(eligible) if allowed]
    if count is None:
        count = len(candidates) if budget_bytes is not None else 0
    for wanted in range(min(count, len(candidates)), -1, -1):
        chosen = _evenly(candidates, wanted) if spread else tuple(candidates[:wanted])
        if budget_bytes is None or sum(block_bytes[block] for block in chosen) <= budget_bytes:
            return chosen
    return ()


def _evenly(candidates: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` of the candidates, in the middles of as many equal parts."""
    return tuple(candidates[(2 * i + 1) * len(candidates) // (2 * count)] for i in range(count))
