"""Which entries have to go. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from streamflow.store.errors import StoreOptionsError


@attrs.frozen(kw_only=True)
class EvictionPolicy:
    """How much may stay. Live leases are always skipped; generations that are damaged always go.

    Attributes:
        max_bytes: what all entries together may take; the longest unused go first. None: no limit.
        max_age_s: how long an entry may stay unused, in seconds. None: no limit.

    :raises StoreOptionsError: if a limit is negative or no number.
    """

    max_bytes: int | None = None
    max_age_s: float | None = None

    def __attrs_post_init__(self) -> None:
        problems = [
            f"{name} must be None or a finite number from 0 on, not {value!r}"
            for name, value in attrs.asdict(self).items()
            if value is not None and (type(value) not in (int, float) or not math.isfinite(value) or value < 0)
        ]
        if problems:
            raise StoreOptionsError(problems)


@attrs.frozen
class Candidate:
    """A generation as the policy sees it: its size, when it was last leased (from 1970), and whether it is unusable."""

    content_id: str
    generation: int
    nbytes: int
    last_used_s: float
    is_denied: bool


def eviction_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The order in which to ask `why_evicted`: what is unusable, then what was not used for longest."""
    return sorted(candidates, key=lambda found: (not found.is_denied, found.last_used_s, found.content_id))


def why_evicted(candidate: Candidate, total_bytes: int, now_s: float, policy: EvictionPolicy) -> str | None:
    """Why this one has to go while ``total_bytes`` are stored; None: it may stay."""
    if candidate.is_denied:
        return "damaged"
    age_s = now_s - candidate.last_used_s
    if policy.max_age_s is not None and age_s > policy.max_age_s:
        return f"not used for {age_s:,.0f} s"
    if policy.max_bytes is not None and total_bytes > policy.max_bytes:
        return f"{total_bytes:,} bytes are stored, {policy.max_bytes:,} may be"
    return None
