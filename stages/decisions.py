"""What the walk planner decides. Frozen values."""

from __future__ import annotations

import attrs


@attrs.frozen
class Fetch:
    """Bring ``block`` into ``slot``; the block that was there (None: none) is dropped first.

    ``on_demand``: a pass stands before the block and the forecast had not foreseen it.
    """

    block: int
    slot: int
    generation: int
    drops: int | None
    on_demand: bool


@attrs.frozen
class Claim:
    """Tell ``pass_id`` that it may enter ``block`` in ``slot``.

    ``serial`` is that of the pass's last `want`. ``rank`` orders the claims of one pass: once it took one, those of
    lower rank are passed by, and it gives them back with its next `left`.
    """

    pass_id: int
    block: int
    slot: int
    generation: int
    serial: int
    rank: int


@attrs.frozen
class Walk:
    """A walk over ``component`` that started at ``started_at``, with the passes that go together."""

    walk_id: int
    component: str
    pass_ids: tuple[int, ...]
    started_at: float


@attrs.frozen
class Refusal:
    """Tell ``pass_id``, which waits for ``serial`` or a walk, that it gets ``error`` instead."""

    pass_id: int
    error: Exception


@attrs.frozen
class Decision:
    """What to do now, in this order. ``joined``: passes that join the walk under way, because it is at its beginning.

    ``refused``: passes that get an error; they go on waiting for nothing. ``again_at``: when to decide again if nothing
    happens before; None: not at all.
    """

    ended: int | None
    started: Walk | None
    joined: tuple[int, ...]
    fetches: tuple[Fetch, ...]
    claims: tuple[Claim, ...]
    again_at: float | None
    refused: tuple[Refusal, ...] = ()
