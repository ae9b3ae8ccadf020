"""A control star within one process, whose ranks can be killed, silenced and delayed."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping

from streamflow.stages.ranks.control import COORDINATING
from streamflow.stages.ranks.errors import RankLostError


class MemoryStar:
    """What is under way between ``size`` ranks. From any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._messages: defaultdict[tuple[int, int], deque[tuple[float, bytes]]] = defaultdict(deque)
        self._delays: dict[int, float] = {}
        self._dead: set[int] = set()
        self._silent: set[int] = set()

    def end(self, rank: int) -> MemoryControl:
        """The end of ``rank``."""
        return MemoryControl(self, rank)

    def kill(self, rank: int) -> None:
        """Its connections are closed: who waits for it, or is waited for by it, learns so at once."""
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()

    def silence(self, rank: int) -> None:
        """Drop what it sends and what is sent to it, from now on, as if it stood still."""
        with self._changed:
            self._silent.add(rank)

    def delay(self, rank: int, seconds: float) -> None:
        """Let what it sends from now on arrive so much later."""
        with self._changed:
            self._delays[rank] = seconds

    def send(self, message: bytes, sender: int, receiver: int) -> None:
        """Leave a message."""
        with self._changed:
            if not {sender, receiver} & (self._silent | self._dead):
                self._messages[sender, receiver].append((time.monotonic() + self._delays.get(sender, 0.0), message))
                self._changed.notify_all()

    def receive(self, sender: int, receiver: int, timeout_s: float, until: float) -> bytes:
        """The next message, waited for ``until`` then."""
        with self._changed:
            messages = self._messages[sender, receiver]
            while not messages or messages[0][0] > time.monotonic():
                if {sender, receiver} & self._dead:
                    raise RankLostError(sender, "its end of the connection is closed")
                next_look = min(until, messages[0][0]) if messages else until
                if not self._changed.wait(max(next_look - time.monotonic(), 0)) and time.monotonic() >= until:
                    raise RankLostError(sender, f"nothing was heard of it for {timeout_s:g} s")
            return messages.popleft()[1]


class MemoryControl:
    """One rank's end; see `Control`."""

    def __init__(self, star: MemoryStar, rank: int) -> None:
        self.rank, self.size = rank, star.size
        self._star = star

    def collect(self, timeout_s: float) -> list[bytes]:
        until = time.monotonic() + timeout_s
        return [self._star.receive(rank, self.rank, timeout_s, until) for rank in range(1, self.size)]

    def answer(self, replies: Mapping[int, bytes]) -> None:
        for rank, reply in replies.items():
            self._star.send(reply, self.rank, rank)

    def flush(self, timeout_s: float) -> None:
        """Messages are with their ranks at once."""

    def report(self, status: bytes, timeout_s: float) -> bytes:
        self._star.send(status, self.rank, COORDINATING)
        return self._star.receive(COORDINATING, self.rank, timeout_s, time.monotonic() + timeout_s)

    def close(self) -> None:
        """There is nothing to give back."""
