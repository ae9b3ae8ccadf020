"""What the coordinator of the ranks asks and tells one rank's own waves. Everything happens on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import attrs

from streamflow.stages.ranks.signature import WaveSignature


@attrs.frozen
class WaitingRequest:
    """A request whose first pass waits for a wave ``since`` then, by ``anyio.current_time()``.

    ``ticket`` is the rank's own number for it, given once: what is answered a round later must not meet a request that
    came meanwhile. ``name`` is what errors call it. ``alone``: no other request of its rank can come to wait beside it.
    """

    ticket: int
    name: str
    signature: WaveSignature
    since: float
    alone: bool = False


@attrs.frozen
class WaveProgress:
    """How far a rank is in its latest wave.

    ``wave``: its number; 0: there was none yet. ``num_started``: walks that it started. ``num_walks``: those that are
    agreed; fewer after an early end. ``num_live``: members of this rank that have not ended. ``is_over``: every agreed
    walk is done here (True where ``wave`` is 0). ``first_visit``: the first of the wave's visits that may still be
    needed here (see `Feed`, which numbers them alike on all ranks); it counts while the wave is under way.
    """

    wave: int
    num_started: int
    num_walks: int
    num_live: int
    is_over: bool
    first_visit: int = 0


@attrs.frozen
class StandingMember:
    """A member that the wave waits for although all it needs is there, and where it is: ``block`` of the wave's walk
    number ``walk``, from 1 (None: after or before it). ``name`` is what errors call it.
    """

    name: str
    walk: int
    block: int | None = None


class LocalWaves(Protocol):
    """One rank's own waves: who waits, and the wave that the rank is in. No call may block.

    1. A request waits (`waiting`) until `begin` makes it a member of a wave, or `refuse` ends it. The coordinator
       begins a wave only where the one before `is_over` on every rank.
    2. The rank starts the wave's walks on its own, as soon as its live members wait for the next one, or are gone.
    3. When no rank has live members left: `hold` on every rank, then `end_after` with the largest number promised.
    4. After `fail` none of the others is called any more.
    """

    on_change: Callable[[], None]
    """Set by the coordinator; called, on the loop, when `waiting` or `progress` changed. It never blocks or fails."""

    def waiting(self) -> Sequence[WaitingRequest]:
        """The requests that wait for a wave, oldest first; they may end by themselves at any time."""

    def progress(self) -> WaveProgress:
        """How far the latest wave is."""

    def standing(self) -> Sequence[StandingMember]:
        """The members for whose own code the wave waits on this rank. The same ones later: they have not moved."""

    def begin(self, wave: int, signature: WaveSignature, tickets: Collection[int]) -> None:
        """The ranks are in wave number ``wave`` now. ``tickets``: the waiting requests that are its members here.

        A ticket that is not waiting any more is no member. None at all: the rank feeds the others.
        """

    def refuse(self, ticket: int, error: Exception) -> None:
        """The request gets ``error``; nothing happens if it waits no more."""

    def hold(self) -> int:
        """Promise to start no walk beyond the returned number of walks, until `end_after`."""

    def end_after(self, num_walks: int) -> None:
        """The wave has ``num_walks`` walks, at least as many as were promised: do those, and no more."""

    def fail(self, error: BaseException) -> None:
        """The ranks cannot work together any more: break this rank's engine with ``error``, which names the rank."""
