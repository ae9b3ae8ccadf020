"""When waiting passes start a walk, and which of them. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from streamflow.stages.decisions import Refusal
from streamflow.stages.feed import Feed
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.returns import Returns


@attrs.frozen
class WaitingPass:
    """A pass that waits for a walk over ``component`` ``since`` then, in seconds of the planner's clock.

    ``alone``: nobody else can come to its component meanwhile, so there is nobody to wait for. ``maker`` is what it has
    in common with its request's other passes, ``request_id`` that request's name (None: it has none), ``wave`` what the
    request said of the wave that it needs (None: nothing).
    """

    pass_id: int
    component: str
    since: float = 0.0
    alone: bool = False
    maker: int | None = None
    request_id: str | None = None
    wave: WaveSignature | None = None


@attrs.frozen
class StandingPass:
    """A pass whose own code a wave waits for: ``block``, its next one, is there (None: its last one is behind it)."""

    request_id: str | None
    block: int | None


@attrs.frozen
class WalkChoice:
    """The passes that start a walk now, all of one component; none: wait on, and ask again at ``again_at``.

    ``again_at`` None: ask when something happens. ``component``: that of a walk of a wave, which starts with the passes
    or without any. ``refused``: passes that wait for nothing.
    """

    pass_ids: tuple[int, ...] = ()
    again_at: float | None = None
    component: str | None = None
    refused: tuple[Refusal, ...] = ()


class WalkSource(Protocol):
    """Says when waiting passes start a walk. Replaceable: ranks agree on walks, one process need not."""

    @property
    def feed(self) -> Feed | None:
        """What is fetched while a wave is under way, and in which components; None: there are no waves."""

    def next_walk(self, waiting: Sequence[WaitingPass], returns: Returns, now: float) -> WalkChoice:
        """The walk that starts now, out of ``waiting`` (oldest first). Called when none is under way."""

    def walk_ended(self, component: str) -> None:
        """The walk over ``component`` that was chosen last has ended."""

    def gone(self, maker: int) -> None:
        """``maker`` makes no more passes."""

    def late_joins(self, waiting: Sequence[WaitingPass], component: str, num_walking: int) -> tuple[int, ...]:
        """Those of ``waiting`` (oldest first) that join the walk over ``component`` which is under way, beside
        ``num_walking`` others. Called while nothing that the walk has visited was dropped, and no pass of it is over.
        """


class WithoutWaves:
    """What sources have in common that know one process only."""

    feed: Feed | None = None

    def walk_ended(self, component: str) -> None:
        """Nothing follows from it."""

    def gone(self, maker: int) -> None:
        """Nothing follows from it."""


@attrs.frozen
class ImmediateWalks(WithoutWaves):
    """Everyone who waits for the oldest pass's component walks together, as soon as ``min_passes`` do."""

    min_passes: int = 1

    def next_walk(self, waiting: Sequence[WaitingPass], returns: Returns, now: float) -> WalkChoice:
        chosen = _for_oldest(waiting)
        return WalkChoice(chosen if len(chosen) >= self.min_passes else ())

    def late_joins(self, waiting: Sequence[WaitingPass], component: str, num_walking: int) -> tuple[int, ...]:
        return ()


@attrs.frozen
class SharedWalks(WithoutWaves):
    """The oldest pass's component walks next, with everyone who waits for it, up to ``max_passes``.

    A walk that has room waits until the oldest pass has waited for ``window_s`` seconds, and for passes that are about
    to come back (see `Returns`). Who comes a little later still joins, unless another component waits. The oldest pass
    always walks, so none starves, and a component whose pass waited while another component walked is next.
    """

    max_passes: int
    window_s: float = 0.0

    def next_walk(self, waiting: Sequence[WaitingPass], returns: Returns, now: float) -> WalkChoice:
        if not waiting:
            return WalkChoice()
        oldest, chosen = waiting[0], _for_oldest(waiting)
        if len(chosen) < self.max_passes and not oldest.alone:
            until = max(oldest.since + self.window_s, returns.expected_until(oldest.component) or now)
            if now < until:
                return WalkChoice(again_at=until)
        return WalkChoice(chosen[: self.max_passes])

    def late_joins(self, waiting: Sequence[WaitingPass], component: str, num_walking: int) -> tuple[int, ...]:
        if any(other.component != component for other in waiting):
            return ()
        return _for_oldest(waiting)[: self.max_passes - num_walking]


def _for_oldest(waiting: Sequence[WaitingPass]) -> tuple[int, ...]:
    """The passes that wait for the component that the oldest waits for; none if nobody waits."""
    return tuple(other.pass_id for other in waiting if other.component == waiting[0].component)
