"""How the ranks' rounds travel: a star, with rank 0, the coordinating one, in its middle.

Messages are bytes. Every wait is bounded and ends with the error that names the rank that was waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

#: The rank in the middle.
COORDINATING = 0


class Control(Protocol):
    """One rank's end of the star. All calls block, in one thread at a time.

    In every round each other rank calls `report`, and the coordinating one `collect` and then `answer`. A rank that was
    lost, or that lost the coordinating one, calls nothing but `close` any more.
    """

    rank: int
    size: int

    def collect(self, timeout_s: float) -> list[bytes]:
        """What ranks 1, 2, ... reported, in this order.

        :raises RankLostError: if one of them is dead, or has not reported after ``timeout_s``.
        """

    def answer(self, replies: Mapping[int, bytes]) -> None:
        """Send these ranks their replies, and do not wait for them; who is dead is found by the next `collect`."""

    def flush(self, timeout_s: float) -> None:
        """Wait until the last replies are with their ranks, at most ``timeout_s``. Fails for nobody."""

    def report(self, status: bytes, timeout_s: float) -> bytes:
        """Report to the coordinating rank; returns its reply.

        :raises RankLostError: if it is dead, or has not replied after ``timeout_s``.
        """

    def close(self) -> None:
        """Give the connections back. Idempotent; does not wait for anybody."""
