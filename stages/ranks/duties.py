"""What one rank says of its own waves in a round, and what it does as it is answered. Without waiting, on the loop."""

from __future__ import annotations

from streamflow.stages.ranks.errors import RankError, WaveMismatchError, WaveTimeoutError
from streamflow.stages.ranks.local_waves import LocalWaves, StandingMember, WaitingRequest
from streamflow.stages.ranks.messages import (
    Ending,
    RankReply,
    RankStatus,
    RequestStatus,
    Standing,
    Verdict,
    WaveBegin,
)


class Duties:
    """The rank's own waves, between two rounds. ``deadline_s``: what a request that is timed out is told."""

    def __init__(self, waves: LocalWaves, deadline_s: float) -> None:
        self._waves = waves
        self._deadline_s = deadline_s
        self._promise: int | None = None
        self._said: object = None
        self._standing: tuple[int, tuple[StandingMember, ...]] = (0, ())
        self._standing_since = 0.0

    def has_news(self) -> bool:
        """Whether there is something that the others wait for. How far a wave is they see from their own walks."""
        return self._gist() != self._said

    def _gist(self) -> object:
        progress = self._waves.progress()
        tickets = tuple(request.ticket for request in self._waves.waiting())
        return progress.wave, progress.is_over, progress.num_live > 0, tickets

    def status(self, now: float) -> RankStatus:
        """What there is to say ``now``."""
        self._said = self._gist()
        return RankStatus(
            progress=self._waves.progress(),
            waiting=tuple(
                RequestStatus(r.ticket, r.name, r.signature, now - r.since, r.alone) for r in self._waves.waiting()
            ),
            promise=self._promise,
            standing=self._note_standing(now),
        )

    def _note_standing(self, now: float) -> Standing | None:
        """Who holds the wave up, and for how long it has been the same, at the same place of the same wave."""
        members = tuple(self._waves.standing())
        before, self._standing = self._standing, (self._waves.progress().wave, members)
        if self._standing != before:
            self._standing_since = now
        if not members:
            return None
        return Standing(tuple(member.name for member in members), now - self._standing_since)

    def do(self, reply: RankReply, now: float) -> None:
        """What ``reply`` to the last status says, but for its verdict."""
        for request in self._waiting(reply.timed_out):
            error = WaveTimeoutError(request.name, now - request.since, self._deadline_s)
            self._waves.refuse(request.ticket, error)
        if reply.begin is not None:
            self._begin(reply.begin)
        if reply.hold:
            self._promise = self._waves.hold()
        if reply.end_after is not None:
            self._promise = None
            self._waves.end_after(reply.end_after)

    def _begin(self, begin: WaveBegin) -> None:
        for request in self._waiting(begin.refused):
            error = WaveMismatchError(request.name, request.signature, begin.founder, begin.signature)
            self._waves.refuse(request.ticket, error)
        self._waves.begin(begin.wave, begin.signature, begin.members)

    def _waiting(self, tickets: tuple[int, ...]) -> list[WaitingRequest]:
        return [request for request in self._waves.waiting() if request.ticket in tickets]

    def end(self, verdict: Verdict, failure: RankError) -> None:
        """The ranks work together no more. A rank that closes when no wave is under way breaks nothing."""
        if verdict.ending is Ending.CLOSED and self._waves.progress().is_over:
            self.turn_away(verdict)
        else:
            self._waves.fail(failure)

    def turn_away(self, verdict: Verdict) -> None:
        """Refuse all that wait for a wave: there will be none."""
        for request in tuple(self._waves.waiting()):
            self._waves.refuse(request.ticket, verdict.error())
