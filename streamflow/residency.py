"""Choosing the blocks that stay on the device. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: How often the level of streaming is halved towards that of the budget: as often as a float tells levels apart.
_NUM_HALVINGS = 53


def choose_residents(
    block_bytes: Sequence[int],
    eligible: Sequence[bool],
    *,
    count: int | None,
    budget_bytes: int | None,
    spread: bool,
) -> tuple[int, ...]:
    """The resident blocks, ascending: at most ``count`` and at most ``budget_bytes`` together, eligible ones only.

    ``count`` None: as much as the budget allows, or none where there is no budget either. ``spread`` False takes the
    first ones. True puts a given number of them evenly between the streamed blocks, and what a budget alone allows so
    that what is left to stream is as even: more of them where blocks are large. Where the budget does not hold the
    chosen number, fewer are chosen, in the same manner.
    """
    candidates = [block for block, allowed in enumerate(eligible) if allowed]
    if count is None and budget_bytes is None:
        return ()
    if count is None and budget_bytes is not None and spread and len({block_bytes[block] for block in candidates}) > 1:
        return _levelling(block_bytes, candidates, budget_bytes)
    for wanted in range(min(len(candidates) if count is None else count, len(candidates)), -1, -1):
        chosen = _evenly(candidates, wanted) if spread else tuple(candidates[:wanted])
        if budget_bytes is None or sum(block_bytes[block] for block in chosen) <= budget_bytes:
            return chosen
    return ()


def _evenly(candidates: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` of the candidates, in the middles of as many equal parts."""
    return tuple(candidates[(2 * i + 1) * len(candidates) // (2 * count)] for i in range(count))


def _levelling(block_bytes: Sequence[int], candidates: Collection[int], budget_bytes: int) -> tuple[int, ...]:
    """Those for ``budget_bytes`` after which every part of the model streams about as much for each of its blocks.

    Where blocks are of several sizes, the large ones rarely compute for as much longer as they take to come (in a model
    of double and single blocks the former have twice the weights, each used for a part of the tokens): they are what
    the compute waits for, and relieving them by the same bytes saves most.
    """
    candidates = frozenset(block for block in candidates if block_bytes[block] <= budget_bytes)
    too_low, fits = 0.0, float(max(block_bytes))
    best, best_bytes = frozenset[int](), 0
    for _ in range(_NUM_HALVINGS):
        level = (too_low + fits) / 2
        residents = _above(level, block_bytes, candidates)
        nbytes = sum(block_bytes[block] for block in residents)
        if nbytes > budget_bytes:
            too_low = level
            continue
        fits = level
        if nbytes > best_bytes:
            best, best_bytes = residents, nbytes
    return tuple(sorted(best | _filling(budget_bytes - best_bytes, block_bytes, candidates - best)))


def _above(level: float, block_bytes: Sequence[int], candidates: Collection[int]) -> frozenset[int]:
    """The residents with which no more than ``level`` bytes for each block are streamed, by diffusing the error: each
    block adds ``level`` to what may be streamed, and is streamed if that is nearer than leaving it out.
    """
    allowed, residents = 0.0, set()
    for block, nbytes in enumerate(block_bytes):
        allowed += level
        if block in candidates and allowed < nbytes / 2:
            residents.add(block)
        else:
            allowed = min(allowed - nbytes, 0.0)  # what small blocks leave is no use to large ones far away
    return frozenset(residents)


def _filling(left_bytes: int, block_bytes: Sequence[int], others: Collection[int]) -> frozenset[int]:
    """What of ``others`` still fits into ``left_bytes``, the largest first."""
    chosen = set()
    for block in sorted(others, key=lambda block: (-block_bytes[block], block)):
        if block_bytes[block] <= left_bytes:
            chosen.add(block)
            left_bytes -= block_bytes[block]
    return frozenset(chosen)
