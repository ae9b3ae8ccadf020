"""The task that keeps this rank in step with the others.

Round by round, it says what there is, and does what it is told. A round travels in a thread; everything is decided and
done on the loop.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs

from streamflow.stages.ranks.agreements import Agreements
from streamflow.stages.ranks.control import COORDINATING, Control
from streamflow.stages.ranks.control_thread import ControlThread
from streamflow.stages.ranks.duties import Duties
from streamflow.stages.ranks.errors import RankError
from streamflow.stages.ranks.local_waves import LocalWaves
from streamflow.stages.ranks.messages import Closing, Ending, RankReply, RankStatus, Verdict
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.rounds import Rounds, open_rounds
from streamflow.stages.signals import LoopEvent, loop_waker
from streamflow.stages.threads import ThreadCrew, open_tasks, wait_through

#: Characters of a failure that the other ranks are told.
REASON_LENGTH = 500


class Coordinator:
    """This rank among the others. Made by `open_coordinator`; used on its loop, but for `blame`.

    ``failure``: why the ranks work together no more; None while they do.
    """

    def __init__(self, rank: int, size: int, rounds: Rounds, options: WaveOptions) -> None:
        self.rank, self.size = rank, size
        self.failure: RankError | None = None
        self._rounds, self._options = rounds, options
        self._wake_loop = loop_waker()
        self._news = anyio.Event()
        self._is_busy = True
        self._duties: Duties | None = None
        self._agreements = Agreements()
        self._closing = Closing.NO
        self._own_failure: str | None = None
        self._verdict: Verdict | None = None
        self._ended = LoopEvent()
        self._failed = threading.Event()

    def attach(self, waves: LocalWaves) -> None:
        """Let waves reach this rank's requests from now on. Once; no rank begins a wave before all have done so.

        If the ranks work together no more, ``waves`` hears of it at once.
        """
        self._duties = Duties(waves, self._options.deadline_s)
        waves.on_change = self._on_change
        if self._verdict is not None and self.failure is not None:
            self._duties.end(self._verdict, self.failure)
        self._tell()

    async def agree(self, name: str, value: object) -> list[Any]:
        """What every rank gave for ``name``, by rank: values for JSON, as they come out of it.

        Waits until every rank has come to this point; a rank that is lost, fails or closes ends the wait. Calls of one
        rank are served one after the other. The others may have agreed when it is cancelled.

        :raises RankError: if the ranks work together no more, or stop doing so meanwhile.
        :raises RanksDisagreeError: if a rank asks for an agreement of another name.
        :raises TypeError: if ``value`` is none for JSON.
        """
        values = await self._agreements.agree(name, value, self._tell)
        if values is None:
            raise self._error()
        return values

    def blame(self, failure: Exception) -> Exception:
        """The error that names the rank because of which a gather failed with ``failure``. From a thread, not the loop.

        Blocks until it is known which, at most ``rank_deadline_s``. If every rank goes on, it is this one that failed,
        and the others are told.
        """
        if self._failed.wait(self._options.rank_deadline_s):
            return self._error()
        self._wake_loop(lambda: self.report(failure))
        return Verdict(Ending.FAILED, self.rank, _reason(failure)).error()

    def report(self, failure: BaseException) -> None:
        """Tell the others that this rank cannot go on because of ``failure``. The first one counts."""
        self._own_failure = self._own_failure or _reason(failure)
        self._tell()

    async def close(self) -> None:
        """Leave the others: when the wave under way is over, or after ``rank_deadline_s``.

        Returns once they know, or cannot be reached. Cancelled, it does not wait for the wave. Idempotent.
        """
        if self._closing is Closing.NO:
            self._closing = Closing.WHEN_OVER
            self._tell()
        try:
            with anyio.move_on_after(self._options.rank_deadline_s):
                await self._ended.wait()
        finally:
            self.close_now()
            absorbed = await wait_through(self._ended)  # rounds are bounded
            if absorbed is not None:
                raise absorbed

    async def wait_until_broken_off(self) -> None:
        """Return once the ranks work together no more and a gather may have been left, by a rank that will not come.

        Who has requests heard of it before. A rank that closes between waves, once all have attached, leaves none.
        """
        await self._ended.wait()
        if self._verdict is not None and self._verdict.ending is Ending.CLOSED and self._duties is not None:
            await anyio.sleep_forever()

    def close_now(self) -> None:
        """Leave the others with the next round, whatever is under way."""
        self._closing = Closing.NOW
        self._tell()

    def _on_change(self) -> None:
        if self._duties is not None and self._duties.has_news():
            self._tell()

    def _tell(self) -> None:
        self._news.set()

    async def serve(self) -> None:
        """Take part in rounds until a verdict; from then on turn away who waits for a wave. Ends by cancellation."""
        try:
            with anyio.CancelScope(shield=True):  # before this rank goes, the others are told
                while self._verdict is None:
                    await self._pause()
                    await self._round()
        finally:
            self._end(Verdict(Ending.FAILED, self.rank, "its coordinator was ended from outside"))
        while True:
            await self._wait_for_news()
            self._turn_away()

    async def _pause(self) -> None:
        """Until this rank has to speak."""
        if self.rank != COORDINATING:
            with anyio.move_on_after(self._options.heartbeat_s if self._is_busy else self._options.idle_heartbeat_s):
                await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        await self._news.wait()
        self._news = anyio.Event()

    async def _round(self) -> None:
        reply = await self._rounds.exchange(self._status)
        self._is_busy = reply.is_busy
        if reply.agreed is not None:
            self._agreements.settle(reply.agreed)
        if reply.verdict is not None:
            self._end(reply.verdict)
        else:
            self._do(reply)

    def _status(self) -> RankStatus:
        status = RankStatus()
        try:
            if self._duties is not None:
                status = self._duties.status(anyio.current_time())
        except Exception as failure:
            self.report(failure)
        return attrs.evolve(
            status, proposal=self._agreements.propose(), closing=self._closing, failure=self._own_failure
        )

    def _do(self, reply: RankReply) -> None:
        try:
            if self._duties is not None:
                self._duties.do(reply, anyio.current_time())
        except Exception as failure:
            self.report(failure)

    def _end(self, verdict: Verdict) -> None:
        """The ranks work together no more. The first verdict counts."""
        if self._verdict is not None:
            return
        self._verdict, self.failure = verdict, verdict.error()
        self._failed.set()
        self._ended.set()
        self._agreements.end()
        if self._duties is not None:
            self._duties.end(verdict, self.failure)

    def _turn_away(self) -> None:
        if self._duties is not None and self._verdict is not None:
            self._duties.turn_away(self._verdict)

    def _error(self) -> RankError:
        """The failure, anew: one error that is raised in several tasks would gather all their tracebacks."""
        if self._verdict is None:
            raise RuntimeError("there is no failure")
        return self._verdict.error()


def _reason(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"[:REASON_LENGTH]


@asynccontextmanager
async def open_coordinator(control: Control, crew: ThreadCrew, options: WaveOptions) -> AsyncIterator[Coordinator]:
    """This rank among the others, which all open theirs; ``control`` and ``crew`` stay the caller's.

    Leaving closes it, in bounded time. What leaves the body is told to the others: an error as a failure of this rank,
    a cancellation as its closing.
    """
    async with open_tasks() as tasks:
        rounds = open_rounds(control, ControlThread(crew), options)
        coordinator = Coordinator(control.rank, control.size, rounds, options)
        tasks.start_soon(coordinator.serve, name="rounds of ranks")
        try:
            yield coordinator
        except Exception as failure:
            coordinator.report(failure)
            raise
        except BaseException:
            coordinator.close_now()
            raise
        finally:
            try:
                await coordinator.close()
            finally:
                tasks.cancel_scope.cancel()
