"""What is done with allocator-cached, unallocated device memory at component boundaries. Pure: no torch, no clock.

Memory that the allocator keeps is what the next request will ask for again; giving it back costs a wait for the whole
device. But kept without end it is missing where others allocate. So it is kept within what was seen to be usual.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

#: The budget over the largest cached value that a boundary has seen.
GROWTH = 1.25
#: The largest share of the device that the budget may take.
CAP_SHARE = 0.25
#: The least share of the device that must be free for anything to be kept.
MIN_FREE_SHARE = 0.05


class Reason(StrEnum):
    """Why memory is kept or given back."""

    WITHIN_BUDGET = "within_budget"
    OVER_BUDGET = "over_budget"
    LOW_FREE_MEMORY = "low_free_memory"
    TELEMETRY_MISSING = "telemetry_missing"
    FAILURE = "failure"
    OUT_OF_MEMORY = "out_of_memory"
    CLOSING = "closing"


@attrs.frozen
class BoundaryReading:
    """The device at a component boundary, in bytes; None: the backend cannot tell.

    ``staged``: what components that move as a whole have on it. ``peak``: the most that streamflow itself had.
    """

    staged: int
    peak: int
    cached: int | None
    free: int | None
    total: int | None


@attrs.frozen
class Retention:
    """What is done with the allocator's cache, and what that was decided by.

    ``releases``: it is given back, else kept. ``budget`` is the one it was decided against, ``cap`` its limit (None:
    unknown). ``deferred``: passes ran, so it was given back later than it was decided.
    """

    releases: bool
    reason: Reason
    reading: BoundaryReading
    budget: int
    cap: int | None
    deferred: bool = False


class RetentionPolicy:
    """Decides at one boundary after the other, and learns from each."""

    def __init__(self) -> None:
        self._budget = 0

    @property
    def budget(self) -> int:
        """Cached bytes that would be kept at the next boundary."""
        return self._budget

    def decide(self, reading: BoundaryReading) -> Retention:
        """What to do at a boundary: by the budget as it was before; then the reading is learned from."""
        cap = None if reading.total is None else int(reading.total * CAP_SHARE)
        reason = self._reason(reading)
        decided = Retention(reason is not Reason.WITHIN_BUDGET, reason, reading, self._budget, cap)
        if reading.cached is not None and cap is not None:
            self._budget = min(max(self._budget, int(reading.cached * GROWTH)), cap)
        return decided

    def _reason(self, reading: BoundaryReading) -> Reason:
        if reading.cached is None or reading.free is None or reading.total is None:
            return Reason.TELEMETRY_MISSING
        if reading.free < reading.total * MIN_FREE_SHARE:
            return Reason.LOW_FREE_MEMORY
        return Reason.OVER_BUDGET if reading.cached > self._budget else Reason.WITHIN_BUDGET

    def force(self, reading: BoundaryReading, reason: Reason) -> Retention:
        """A release whatever the reading says. Nothing is learned from it."""
        cap = None if reading.total is None else int(reading.total * CAP_SHARE)
        return Retention(True, reason, reading, self._budget, cap)

    def reset(self) -> None:
        """Forget what was learned: the last staged component is gone."""
        self._budget = 0
