"""How long a benchmark may take; what comes too late is left out, and said."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class TimeLimit:
    """``seconds`` from now on; None: no limit. ``left_out`` names what was not begun because of it."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = math.inf if seconds is None else clock() + seconds
        self.left_out: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._ends_at - self._clock())

    def is_before(self, what: str) -> bool:
        """Whether there is time to begin ``what``; if not, it is left out."""
        if self.left_s > 0:
            return True
        self.left_out.append(what)
        return False
