"""This rank's own side of the waves: who waits for one, and when the next walk of the one under way starts. Pure.

Told by two sides, on one loop: the walk planner, what the passes of this rank do; the coordinator, what the ranks
agreed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from streamflow.stages.decisions import Refusal
from streamflow.stages.feed import Feed
from streamflow.stages.ranks.errors import SignatureMissingError, WaveComponentsError
from streamflow.stages.ranks.local_waves import StandingMember, WaitingRequest, WaveProgress
from streamflow.stages.ranks.signature import WaveNeed, WaveSignature
from streamflow.stages.returns import Returns
from streamflow.stages.walk_sources import StandingPass, WaitingPass, WalkChoice, WalkSource


class WaveWalks:
    """A `WalkSource` for the components that the ranks gather together, and one rank's `LocalWaves`.

    A walk of the wave under way starts when all its live members wait for it; who does something else first, or does
    not come within ``let_go_after_s`` (None: however long it takes), is a member no more. Walks over other components
    are ``local`` to the rank, and start between waves: while one is under way its blocks have the window.
    ``default_wave`` counts for requests that say nothing. The owner connects ``wake``, which lets the planner decide
    anew, ``on_failure``, which breaks the engine, and ``standing_passes``, those that the walk under way waits for.
    """

    def __init__(
        self,
        feed: Feed,
        local: WalkSource,
        default_wave: WaveSignature | None = None,
        *,
        let_go_after_s: float | None = None,
    ) -> None:
        self._feed = feed
        self._local = local
        self._default_wave = default_wave
        self._let_go_after_s = let_go_after_s
        self._wave = 0
        self._live: dict[int, str] = {}
        self._away: tuple[str, ...] = ()
        self._away_since = 0.0
        self._is_held = False
        self._waiting: tuple[WaitingRequest, ...] = ()
        self._makers: dict[int, int] = {}
        self._refused: dict[int, Exception] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.wake: Callable[[], None] = lambda: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.standing_passes: Callable[[], Sequence[StandingPass]] = tuple

    def components_of(self, wave: WaveNeed | None) -> frozenset[str]:
        """The components of the wave that a request needs (None: the default one). From any thread."""
        need = self._default_wave if wave is None else wave
        return frozenset() if need is None else frozenset(need.walks())

    # For the walk planner

    @property
    def feed(self) -> Feed:
        return self._feed

    def next_walk(self, waiting: Sequence[WaitingPass], returns: Returns, now: float) -> WalkChoice:
        self._let_go(waiting)
        refused = tuple(self._refusals(waiting))
        ended = {refusal.pass_id for refusal in refused}
        waiting = [other for other in waiting if other.pass_id not in ended]
        collective = [other for other in waiting if other.component in self._feed.components]
        self._note_waiting(collective)
        if self._is_on:
            return self._next_of_wave(collective, refused, now)
        local = [other for other in waiting if other.component not in self._feed.components]
        choice = self._local.next_walk(local, returns, now)
        return WalkChoice(choice.pass_ids, choice.again_at, refused=refused)

    def _let_go(self, waiting: Sequence[WaitingPass]) -> None:
        """Members that do something else now are none any more: the wave would wait for them, and they for its end."""
        for other in waiting:
            does_something_else = other.component != self._feed.next_component
            if other.maker is not None and other.maker in self._members and does_something_else:
                self.gone(other.maker)

    @property
    def _is_on(self) -> bool:
        """Whether a wave is under way, one whose end is being agreed on included."""
        return self._feed.is_on or self._is_held

    @property
    def _members(self) -> set[int]:
        """The live members that a walk is still to be started for; what the others do is no part of the wave."""
        return set(self._live) if self._feed.next_component is not None else set()

    def _refusals(self, waiting: Sequence[WaitingPass]) -> list[Refusal]:
        found = [(other.pass_id, self._why_not(other)) for other in waiting]
        return [Refusal(pass_id, error) for pass_id, error in found if error is not None]

    def _why_not(self, waiting: WaitingPass) -> Exception | None:
        """Why the pass gets no walk; None if it does, or has to wait."""
        if waiting.component not in self._feed.components or waiting.maker in self._members:
            return None
        if waiting.pass_id in self._refused:
            return self._refused.pop(waiting.pass_id)
        signature = self._signature_of(waiting)
        if signature is None:
            return SignatureMissingError(waiting.component, waiting.request_id)
        unknown = set(signature.walks()) - self._feed.components
        if unknown or signature.walks()[0] != waiting.component:
            return WaveComponentsError(waiting.request_id, waiting.component, signature, self._feed.components)
        return None

    def _signature_of(self, waiting: WaitingPass) -> WaveSignature | None:
        return waiting.wave if waiting.wave is not None else self._default_wave

    def _note_waiting(self, collective: Sequence[WaitingPass]) -> None:
        members = self._members
        before, self._waiting = (
            self._waiting,
            tuple(
                WaitingRequest(other.pass_id, _name_of(other.request_id), signature, other.since, other.alone)
                for other in collective
                if other.maker is not None and other.maker not in members
                if (signature := self._signature_of(other)) is not None
            ),
        )
        self._makers = {other.pass_id: other.maker for other in collective if other.maker is not None}
        self._refused = {ticket: error for ticket, error in self._refused.items() if ticket in self._makers}
        if before != self._waiting:
            self.on_change()

    def _next_of_wave(self, collective: Sequence[WaitingPass], refused: tuple[Refusal, ...], now: float) -> WalkChoice:
        component = self._feed.next_component
        passes = {other.maker: other.pass_id for other in collective if other.maker in self._live}
        again_at = None if component is None else self._wait_for_away(self._live.keys() - passes.keys(), now)
        if component is None or self._away:
            return WalkChoice(again_at=again_at, refused=refused)
        return WalkChoice(tuple(passes.values()), component=component, refused=refused)

    def _wait_for_away(self, away: Collection[int], now: float) -> float | None:
        """The members ``away`` are waited for, or were for too long; returns when that will be."""
        if not self._away:
            self._away_since = now
        self._away = tuple(name for maker, name in self._live.items() if maker in away)
        if not self._away or self._let_go_after_s is None:
            return None
        until = self._away_since + self._let_go_after_s
        if now >= until:
            self._away = ()
            for maker in away:
                self.gone(maker)
        return until

    def late_joins(self, waiting: Sequence[WaitingPass], component: str, num_walking: int) -> tuple[int, ...]:
        if component in self._feed.components:
            return ()
        local = [other for other in waiting if other.component not in self._feed.components]
        return self._local.late_joins(local, component, num_walking)

    def walk_ended(self, component: str) -> None:
        if component in self._feed.components and not self._is_on:
            self._live.clear()
            self.on_change()

    def gone(self, maker: int) -> None:
        # at once: while this rank walks alone, nobody looks at who waits, and a wave may begin
        still = tuple(request for request in self._waiting if self._makers[request.ticket] != maker)
        if maker in self._live or still != self._waiting:
            self._live.pop(maker, None)
            self._waiting = still
            self.on_change()

    # For the coordinator, see `LocalWaves`

    def waiting(self) -> Sequence[WaitingRequest]:
        return self._waiting

    def progress(self) -> WaveProgress:
        feed = self._feed
        num_live = len(self._live)
        return WaveProgress(self._wave, feed.num_started, feed.num_walks, num_live, not self._is_on, feed.floor)

    def standing(self) -> Sequence[StandingMember]:
        walk = self._feed.num_started
        if self._is_on and self._away and self._let_go_after_s is None:
            return [StandingMember(name, walk) for name in self._away]
        return [StandingMember(_name_of(each.request_id), walk, each.block) for each in self.standing_passes()]

    def begin(self, wave: int, signature: WaveSignature, tickets: Collection[int]) -> None:
        self._wave = wave
        self._live = {self._makers[r.ticket]: r.name for r in self._waiting if r.ticket in tickets}
        self._feed.begin(signature.walks())
        self.wake()

    def refuse(self, ticket: int, error: Exception) -> None:
        if any(request.ticket == ticket for request in self._waiting):
            self._refused[ticket] = error
            self.wake()

    def hold(self) -> int:
        promised = self._feed.num_walks_touched
        self._feed.limit(promised)
        self._is_held = True
        return promised

    def end_after(self, num_walks: int) -> None:
        self._is_held = False
        self._feed.limit(num_walks)
        if not self._is_on:
            self._live.clear()
            self.on_change()
        self.wake()

    def fail(self, error: BaseException) -> None:
        self.on_failure(error)

    # For the owner

    def release_members(self) -> None:
        """No pass of this rank comes any more: what is left of the wave is fed. To be called on the loop."""
        self._live.clear()
        self.on_change()
        self.wake()


def _name_of(request_id: str | None) -> str:
    return request_id or "a direct call"
