"""What the coordinating rank decides from what all ranks say. Pure: no torch, no clock, no task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import attrs

from streamflow.stages.ranks.local_waves import WaveProgress
from streamflow.stages.ranks.messages import (
    Closing,
    Ending,
    Proposal,
    RankReply,
    RankStatus,
    RequestStatus,
    Verdict,
    WaveBegin,
)
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.signature import WaveSignature


class WaveTable:
    """The waves of a gather group, from round to round.

    Every round has one status of each rank, and one reply to each. What a reply says has been done by the rank when it
    speaks next. Then: there are never two waves at once; all ranks begin the same ones in the same order; a wave has
    the same number of walks on all, at least as many as any of them was told or promised that it may start; and while
    rounds go on, every request begins, is refused, or is timed out.
    """

    def __init__(self, options: WaveOptions) -> None:
        self._options = options
        self._wave = 0
        self._end_is_agreed = False
        self._differing: list[Proposal] = []

    def decide(self, statuses: Sequence[RankStatus]) -> list[RankReply]:
        """The replies to ``statuses``, both by rank."""
        verdict = self._verdict(statuses)
        if verdict is not None:
            return [RankReply(verdict=verdict)] * len(statuses)
        end_after = self._agreed_end(statuses)
        begins = self._begin(statuses) if end_after is None else [None] * len(statuses)
        shared = RankReply(
            hold=end_after is None and self._should_hold(statuses),
            end_after=end_after,
            agreed=self._agreed(statuses),
            is_busy=any(map(_is_busy, statuses)),
        )
        return [
            attrs.evolve(shared, begin=begin, timed_out=self._timed_out(status, begin))
            for status, begin in zip(statuses, begins, strict=True)
        ]

    def _verdict(self, statuses: Sequence[RankStatus]) -> Verdict | None:
        for rank, status in enumerate(statuses):
            if status.failure is not None:
                return Verdict(Ending.FAILED, rank, status.failure)
            if status.progress is not None and status.progress.wave != self._wave:
                reason = (
                    f"it is in wave {status.progress.wave} while the ranks are in {self._wave}; report this as a bug"
                )
                return Verdict(Ending.FAILED, rank, reason)
        return self._standing(statuses) or self._closing(statuses)

    def _standing(self, statuses: Sequence[RankStatus]) -> Verdict | None:
        """The verdict on the rank that has held the wave up for too long: on none that is further than another one, or
        beside one that is on the move. It may wait for that, as in a collective of the model's own.
        """
        limit_s, last = self._options.member_deadline_s, _furthest_behind(statuses)
        found = {rank: status.standing for rank, status in enumerate(statuses) if status.standing is not None}
        seconds = {rank: found[rank].seconds for rank in last if rank in found}
        if limit_s is None or not last or len(seconds) < len(last) or min(seconds.values()) < limit_s:
            return None
        rank = max(last, key=lambda rank: seconds[rank])
        names = ", ".join(map(repr, found[rank].names))
        reason = (
            f"{names} did nothing for {seconds[rank]:.1f} s while a wave waited for it, though all that it needed was"
        )
        reason += f" there (member_deadline_s is {limit_s:g})"
        others = [str(other) for other in found if other != rank]
        if others:
            reason += f"; ranks {', '.join(others)} stood still, too, perhaps because of it"
        return Verdict(Ending.FAILED, rank, reason)

    def _closing(self, statuses: Sequence[RankStatus]) -> Verdict | None:
        for rank, status in enumerate(statuses):
            is_time = all(s.progress is None or s.progress.is_over for s in statuses)
            if status.closing is Closing.NOW or (status.closing is Closing.WHEN_OVER and is_time):
                return Verdict(Ending.CLOSED, rank, "")
        return None

    def _begin(self, statuses: Sequence[RankStatus]) -> Sequence[WaveBegin | None]:
        """A wave, told to each rank, if it is time for one."""
        oldest = _oldest(statuses, self._signatures(statuses))
        if oldest is None or not all(map(_can_begin, statuses)) or not self._is_time(oldest[1], statuses):
            return [None] * len(statuses)
        self._wave += 1
        self._end_is_agreed = False
        num_members = self._num_members(oldest[1].signature, statuses)
        return [self._begin_for(status, num_members, *oldest) for status in statuses]

    def _signatures(self, statuses: Sequence[RankStatus]) -> set[WaveSignature]:
        """Those of which there may be a wave now."""
        waiting = [{request.signature for request in status.waiting} for status in statuses]
        return set.intersection(*waiting) if self._options.needs_all_ranks else set.union(*waiting)

    def _is_time(self, oldest: RequestStatus, statuses: Iterable[RankStatus]) -> bool:
        are_full = all(self._is_full(_alike(status, oldest.signature)) for status in statuses)
        return are_full or oldest.waited_s >= self._options.window_s

    def _is_full(self, alike: Sequence[RequestStatus]) -> bool:
        """Whether a rank where these wait will not have more members, however long the others wait for it."""
        return len(alike) >= self._options.max_passes or any(request.alone for request in alike)

    def _num_members(self, signature: WaveSignature, statuses: Iterable[RankStatus]) -> int:
        """How many members a rank may have at most."""
        if not self._options.needs_all_ranks:
            return self._options.max_passes
        return min(self._options.max_passes, *(len(_alike(status, signature)) for status in statuses))

    def _begin_for(self, status: RankStatus, num_members: int, rank: int, oldest: RequestStatus) -> WaveBegin:
        alike = [request.ticket for request in _alike(status, oldest.signature)]
        others = [request.ticket for request in status.waiting if request.signature != oldest.signature]
        return WaveBegin(
            self._wave,
            oldest.signature,
            f"request {oldest.name!r} of rank {rank}",
            members=tuple(alike[:num_members]),
            # where each request is every rank's, one of them may not have come to all: it has a wave of its own later
            refused=() if self._options.needs_all_ranks else tuple(others),
        )

    def _timed_out(self, status: RankStatus, begin: WaveBegin | None) -> tuple[int, ...]:
        answered = () if begin is None else (*begin.members, *begin.refused)
        return tuple(
            request.ticket
            for request in status.waiting
            if request.waited_s >= self._options.deadline_s and request.ticket not in answered
        )

    def _should_hold(self, statuses: Sequence[RankStatus]) -> bool:
        """Whether the wave is to end early: no rank has a member left, and some have walks left to start."""
        progresses = _progresses(statuses)
        if self._end_is_agreed or not progresses or any(progress.num_live for progress in progresses):
            return False
        return any(progress.num_started < progress.num_walks for progress in progresses)

    def _agreed_end(self, statuses: Sequence[RankStatus]) -> int | None:
        """The number of walks that the wave ends after, once all ranks have promised."""
        promises = [status.promise for status in statuses if status.promise is not None]
        if self._end_is_agreed or len(promises) < len(statuses):
            return None
        self._end_is_agreed = True
        return max(promises)

    def _agreed(self, statuses: Sequence[RankStatus]) -> tuple[Proposal, ...] | None:
        """What all ranks propose, if it is of one name, or of different ones for the second time: the first time, one
        may have been withdrawn while the round was under way.
        """
        proposals = [status.proposal for status in statuses if status.proposal is not None]
        differing = proposals if len({proposal.name for proposal in proposals}) > 1 else []
        before, self._differing = self._differing, differing
        is_settled = len(proposals) == len(statuses) and (not differing or differing == before)
        return tuple(proposals) if is_settled else None


def _oldest(statuses: Sequence[RankStatus], signatures: Collection[WaveSignature]) -> tuple[int, RequestStatus] | None:
    """The request of ``signatures`` that has waited longest, and its rank; of equal ones, that of the lowest rank."""
    waiting = [(rank, request) for rank, status in enumerate(statuses) for request in status.waiting]
    eligible = [found for found in waiting if found[1].signature in signatures]
    return max(eligible, key=lambda found: found[1].waited_s, default=None)


def _furthest_behind(statuses: Sequence[RankStatus]) -> list[int]:
    """The ranks that the others wait for, of those that are in a wave; several that are at the same place."""
    places = {
        rank: (progress.num_started, progress.first_visit)
        for rank, status in enumerate(statuses)
        if (progress := status.progress) is not None and not progress.is_over
    }
    return [rank for rank, place in places.items() if place == min(places.values())]


def _alike(status: RankStatus, signature: WaveSignature) -> list[RequestStatus]:
    return [request for request in status.waiting if request.signature == signature]


def _can_begin(status: RankStatus) -> bool:
    return status.progress is not None and status.progress.is_over


def _progresses(statuses: Iterable[RankStatus]) -> list[WaveProgress]:
    """How far the ranks are; empty until there is a wave, which all are in."""
    return [status.progress for status in statuses if status.progress is not None and status.progress.wave]


def _is_busy(status: RankStatus) -> bool:
    """Whether something waits that another rank has to do."""
    progress = status.progress
    is_ending = progress is not None and not progress.is_over and not progress.num_live
    return bool(status.waiting) or status.proposal is not None or status.closing is not Closing.NO or is_ending
