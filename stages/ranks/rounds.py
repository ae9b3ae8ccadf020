"""One round: this rank says what there is, and is answered. The coordinating rank decides for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from streamflow.stages.ranks.control import COORDINATING, Control
from streamflow.stages.ranks.control_thread import ControlThread
from streamflow.stages.ranks.errors import RankLostError
from streamflow.stages.ranks.messages import (
    Ending,
    RankReply,
    RankStatus,
    Verdict,
    decode_reply,
    decode_status,
    encode,
)
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.wave_table import WaveTable

#: Makes the status at the time when it is sent.
Compose = Callable[[], RankStatus]


class Rounds(Protocol):
    """The rounds of one rank."""

    async def exchange(self, compose: Compose) -> RankReply:
        """The reply to what ``compose`` says. A rank that is lost is a verdict in it, never an exception.

        Takes at most ``rank_deadline_s``, however it is cancelled.
        """


class FollowingRounds:
    """Those of every rank but the coordinating one."""

    def __init__(self, control: Control, thread: ControlThread, options: WaveOptions) -> None:
        self._control, self._thread, self._options = control, thread, options
        self._attention = Attention(control.rank, options.lost_after_s)

    async def exchange(self, compose: Compose) -> RankReply:
        try:
            self._attention.check()
            status = encode(compose())
            return decode_reply(await self._thread.call(lambda: self._report(status)))
        except RankLostError as lost:
            return _lost(lost)

    def _report(self, status: bytes) -> bytes:
        with self._attention.needed():
            return self._control.report(status, self._options.rank_deadline_s)


class LeadingRounds:
    """Those of the coordinating rank. It is always listening: the pace is the others'."""

    def __init__(self, control: Control, thread: ControlThread, options: WaveOptions) -> None:
        self._control, self._thread, self._options = control, thread, options
        self._attention = Attention(control.rank, options.rank_deadline_s)
        self._table = WaveTable(options)

    async def exchange(self, compose: Compose) -> RankReply:
        try:
            reports = await self._thread.call(self._collect)
            self._attention.check()
            replies = self._table.decide([compose(), *map(decode_status, reports)])
        except RankLostError as lost:
            replies = [_lost(lost)] * self._control.size
        await self._thread.call(lambda: self._answer(replies))
        return replies[COORDINATING]

    def _collect(self) -> list[bytes]:
        with self._attention.needed():
            return self._control.collect(self._options.lost_after_s)

    def _answer(self, replies: Sequence[RankReply]) -> None:
        self._control.answer({rank: encode(reply) for rank, reply in enumerate(replies) if rank != COORDINATING})
        if replies[COORDINATING].verdict is not None:  # nobody will ask again: the others have to get this one
            self._control.flush(self._options.lost_after_s)


class Attention:
    """Whether this rank's event loop, once the others needed it, came to it before they gave the rank up."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank, self._limit_s = rank, limit_s
        self._needed_since = time.monotonic()

    @contextmanager
    def needed(self) -> Iterator[None]:
        """The loop is needed from its end on. In the thread."""
        yield
        self._needed_since = time.monotonic()

    def check(self) -> None:
        """The loop has come. It is this rank that is lost to the others, if it comes too late.

        :raises RankLostError: then.
        """
        late_s = time.monotonic() - self._needed_since
        if late_s >= self._limit_s:
            raise RankLostError(self._rank, f"its event loop was blocked, or it stood still, for {late_s:.1f} s")


def open_rounds(control: Control, thread: ControlThread, options: WaveOptions) -> Rounds:
    """The rounds of ``control``'s rank."""
    return (LeadingRounds if control.rank == COORDINATING else FollowingRounds)(control, thread, options)


def _lost(lost: RankLostError) -> RankReply:
    return RankReply(verdict=Verdict(Ending.LOST, lost.rank, lost.reason))
