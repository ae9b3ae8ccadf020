"""Who is about to come back: makers of passes that are between two of them. Pure: no torch, no clock.

Requests that walk together end their passes a moment apart, do their step, and begin the next pass. A walk that
started with the first one back would leave the others to a walk of their own; from then on they would take turns, and
every block would be fetched for each of them. So a walk waits a little for those whose next pass is a matter of less
than half a walk: together they need one walk and that wait, apart they need two.
"""

from __future__ import annotations

import attrs

#: What is assumed of a maker whose first pass ended just now, in seconds between passes.
FIRST_GAP_S = 0.05
#: Makers are waited for as long as twice their last gap and this, in seconds: gaps vary.
SPARE_S = 0.02
#: The longest wait, in walks.
MAX_SHARE_OF_WALK = 0.5
#: Makers that are remembered at most; threads that call the model directly never say that they are gone.
MAX_MAKERS = 256


@attrs.define
class _Maker:
    component: str
    ended_at: float | None = None
    gap_s: float = FIRST_GAP_S


class Returns:
    """Remembers when each maker's last pass ended, and how long after the one before it the next began.

    All times are of one clock, in seconds. A maker is any number that all passes of one request have in common.
    """

    def __init__(self) -> None:
        self._makers: dict[int, _Maker] = {}
        self._walk_s: dict[str, float] = {}

    def began(self, maker: int, component: str, now: float) -> None:
        """A pass of ``maker`` begins."""
        known = self._makers.get(maker)
        if known is None or known.component != component:
            self._makers[maker] = known = _Maker(component)
        elif known.ended_at is not None:
            known.gap_s = now - known.ended_at
        known.ended_at = None

    def ended(self, maker: int, now: float) -> None:
        """The pass of ``maker`` is over."""
        known = self._makers.pop(maker, None)
        if known is not None:
            known.ended_at = now
            self._makers[maker] = known  # last, as the one to forget last
            if len(self._makers) > MAX_MAKERS:
                del self._makers[next(iter(self._makers))]

    def gone(self, maker: int) -> None:
        """``maker`` makes no more passes."""
        self._makers.pop(maker, None)

    def walked(self, component: str, walk_s: float) -> None:
        """A walk over ``component`` took so long."""
        self._walk_s[component] = walk_s

    def expected_until(self, component: str) -> float | None:
        """Until when somebody's return to ``component`` is worth waiting for; None: nobody is between two passes."""
        limit_s = MAX_SHARE_OF_WALK * self._walk_s.get(component, 0.0)
        ends = [
            maker.ended_at + _patience_s(maker.gap_s, limit_s)
            for maker in self._makers.values()
            if maker.component == component and maker.ended_at is not None
        ]
        return max(ends, default=None)


def _patience_s(gap_s: float, limit_s: float) -> float:
    return min(limit_s, 2 * gap_s + SPARE_S) if gap_s <= limit_s else 0.0
