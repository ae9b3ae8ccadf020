"""A rank's own waves without an engine: a script says what requests do, and every promise is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NoReturn

import attrs

from streamflow.stages.errors import StreamflowError
from streamflow.stages.ranks.local_waves import StandingMember, WaitingRequest, WaveProgress
from streamflow.stages.ranks.signature import WaveSignature


class WavesError(StreamflowError, RuntimeError):
    """The coordinator broke a promise about waves."""


@attrs.frozen
class BegunWave:
    """A wave as it began on this rank: with these tickets of its own."""

    wave: int
    signature: WaveSignature
    members: frozenset[int]


def _ignore() -> None:
    """Nobody listens yet."""


class ScriptedWaves:
    """See `LocalWaves`. ``begun``, ``refused``, ``num_walks_done`` (by wave) and ``failure`` are what came of it.

    ``num_ahead``: how many walks beyond the started ones it cannot promise away.
    """

    def __init__(self, clock: Callable[[], float], num_ahead: int = 0) -> None:
        self.on_change: Callable[[], None] = _ignore
        self.begun: list[BegunWave] = []
        self.refused: dict[int, Exception] = {}
        self.withdrawn: set[int] = set()
        self.num_walks_done: dict[int, int] = {}
        self.failure: BaseException | None = None
        self._clock, self._num_ahead = clock, num_ahead
        self._num_tickets = 0
        self._waiting: dict[int, WaitingRequest] = {}
        self._live: set[int] = set()
        self._standing: dict[int, StandingMember] = {}
        self._num_started = self._num_walks = 0
        self._held_at: int | None = None

    # what a script does

    def add(self, signature: WaveSignature, name: str | None = None) -> int:
        """A request begins to wait; returns its ticket."""
        ticket = self._num_tickets
        self._num_tickets += 1
        name = f"request {ticket}" if name is None else name
        self._waiting[ticket] = WaitingRequest(ticket, name, signature, self._clock())
        self.on_change()
        return ticket

    def end(self, ticket: int) -> None:
        """A request ends, whether it waits or is a member of the wave."""
        if self._waiting.pop(ticket, None) is not None:
            self.withdrawn.add(ticket)
        self._live.discard(ticket)
        self._standing.pop(ticket, None)
        self.on_change()

    def stand(self, ticket: int, block: int, name: str | None = None) -> None:
        """A member stands still before ``block`` of the walk under way, until the next one."""
        name = f"request {ticket}" if name is None else name
        self._standing[ticket] = StandingMember(name, self._num_started, block)

    @property
    def live(self) -> frozenset[int]:
        """The members of the wave that have not ended."""
        return frozenset(self._live)

    def can_walk(self) -> bool:
        """Whether the next walk may start."""
        return self._num_started < (self._num_walks if self._held_at is None else self._held_at)

    def walk(self) -> None:
        """Start the next walk, which is done at once; after the last one the members end."""
        if not self.can_walk():
            raise WavesError(f"walk {self._num_started + 1} may not start")
        self._num_started += 1
        self._standing.clear()
        self._note_end()
        self.on_change()

    def _note_end(self) -> None:
        if self.begun:
            self.num_walks_done[self.begun[-1].wave] = self._num_started
        if self._num_started == self._num_walks:
            self._live.clear()

    # what the coordinator asks and tells

    def waiting(self) -> list[WaitingRequest]:
        return list(self._waiting.values())

    def progress(self) -> WaveProgress:
        wave = self.begun[-1].wave if self.begun else 0
        is_over = self._num_started == self._num_walks
        return WaveProgress(wave, self._num_started, self._num_walks, len(self._live), is_over)

    def standing(self) -> list[StandingMember]:
        return [self._standing[ticket] for ticket in sorted(self._standing)]

    def begin(self, wave: int, signature: WaveSignature, tickets: Collection[int]) -> None:
        progress = self.progress()
        if not progress.is_over or wave != progress.wave + 1:
            self._complain(f"wave {wave} began during {progress}")
        members = frozenset(ticket for ticket in tickets if ticket in self._waiting)
        wrong = [ticket for ticket in members if self._waiting[ticket].signature != signature]
        if wrong:
            self._complain(f"tickets {wrong} are in wave {wave} of another signature")
        for ticket in members:
            del self._waiting[ticket]
        self.begun.append(BegunWave(wave, signature, members))
        self._live = set(members)
        self._num_started, self._num_walks, self._held_at = 0, signature.num_walks, None
        self._note_end()
        self.on_change()

    def refuse(self, ticket: int, error: Exception) -> None:
        if self._waiting.pop(ticket, None) is not None:
            self.refused[ticket] = error
            self.on_change()

    def hold(self) -> int:
        if self._live:
            self._complain(f"the wave was held while {sorted(self._live)} were in it")
        self._held_at = min(self._num_started + self._num_ahead, self._num_walks)
        return self._held_at

    def end_after(self, num_walks: int) -> None:
        if self._held_at is None or not self._held_at <= num_walks <= self._num_walks:
            self._complain(f"the end after {num_walks} walks was told, with {self._held_at} promised")
        self._num_walks, self._held_at = num_walks, None
        self._note_end()
        self.on_change()

    def fail(self, error: BaseException) -> None:
        if self.failure is not None:
            self._complain("the waves were failed twice")
        self.failure = error
        self._waiting.clear()
        self._live.clear()

    def _complain(self, problem: str) -> NoReturn:
        raise WavesError(problem)
