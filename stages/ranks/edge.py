"""One connection of the control star: messages between two ranks over a gloo group of these two.

Each edge has a group of its own, because gloo gives up a whole group when one wait in it takes too long: the ranks that
are alive could not be told who is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import attrs
import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from streamflow.stages.ranks.errors import RankLostError

#: A message begins with a frame of this size: its length, in so many bytes, and as much of it as there is room for.
#: Each tensor costs several wake-ups on both sides, so what fits is sent as one.
FRAME_BYTES = 2048
_LENGTH_BYTES = 8
#: Tags of the two parts of a message: its frame and the rest.
_FRAME, _REST = 0, 1


@attrs.frozen
class Deadline:
    """A point in time, ``timeout_s`` after it was set."""

    timeout_s: float
    at: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """The deadline in ``timeout_s`` from now."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether the time has come."""
        return time.monotonic() >= self.at

    @property
    def left(self) -> timedelta:
        """The time until then; never 0, which would mean the group's own timeout."""
        return timedelta(seconds=max(self.at - time.monotonic(), 0.001))


class Pair(Protocol):
    """What is used of a gloo group of two; torch declares it nowhere."""

    def rank(self) -> int: ...

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int, /) -> Work: ...


class Edge:
    """This rank's end of a connection to rank ``peer``. For one thread at a time.

    gloo reads and writes the memory of a message until its work is done or gone: so the work always goes first.
    """

    def __init__(self, group: Pair, peer: int) -> None:
        self.peer = peer
        self._group: Pair | None = group
        self._other = 1 - group.rank()
        self._sending: list[Work] = []
        self._sent: list[torch.Tensor] = []
        self._frame, self._rest = bytearray(FRAME_BYTES), bytearray()

    @classmethod
    def connect(cls, store: Store, meeting: str, *, end: int, peer: int, timeout_s: float) -> Edge:
        """Connect this ``end`` (0 or 1) to ``peer``, which does the same; ``meeting`` is used once.

        :raises RankLostError: if the other one does not, in ``timeout_s``.
        """
        try:
            group: Any = ProcessGroupGloo(PrefixStore(meeting, store), end, 2, timedelta(seconds=timeout_s))
        except RuntimeError as failure:
            raise RankLostError(peer, f"no connection to it could be made in {timeout_s:g} s") from failure
        return cls(group, peer)

    def send(self, message: bytes) -> None:
        """Send ``message``, and do not wait until it is taken. The one before has been.

        :raises RankLostError: if the connection is closed.
        """
        room = FRAME_BYTES - _LENGTH_BYTES
        frame = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:room].ljust(room, b"\0")
        parts = [(part, tag) for part, tag in ((frame, _FRAME), (message[room:], _REST)) if part]
        self._sending.clear()
        self._sent = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part, _ in parts]
        for data, (_, tag) in zip(self._sent, parts, strict=True):
            with self._pair() as pair:
                self._sending.append(pair.send([data], self._other, tag))

    def flush(self, deadline: Deadline) -> None:
        """Wait until what was sent is taken.

        :raises RankLostError: if it is not by ``deadline``, or the connection is closed.
        """
        for work in self._sending:
            self._wait(work, deadline)

    def expect(self) -> Work:
        """Be ready for a message, one at a time; for `receive`.

        :raises RankLostError: if the connection is closed.
        """
        return self._receive_into(self._frame, _FRAME)

    def receive(self, expected: Work, deadline: Deadline) -> bytes:
        """The message that is expected.

        :raises RankLostError: if it has not come by ``deadline``, or the connection is closed.
        """
        self._wait(expected, deadline)
        length = int.from_bytes(self._frame[:_LENGTH_BYTES], "little")
        head = bytes(self._frame[_LENGTH_BYTES : _LENGTH_BYTES + length])
        self._rest = bytearray(length - len(head))
        if self._rest:
            self._wait(self._receive_into(self._rest, _REST), deadline)
        return head + self._rest

    def _receive_into(self, memory: bytearray, tag: int) -> Work:
        with self._pair() as pair:
            return pair.recv([torch.frombuffer(memory, dtype=torch.uint8)], self._other, tag)

    @contextmanager
    def _pair(self) -> Iterator[Pair]:
        if self._group is None:
            raise RankLostError(self.peer, "the connection to it is closed on this side")
        try:
            yield self._group
        except RuntimeError as failure:
            raise self._lost() from failure

    def _wait(self, work: Work, deadline: Deadline) -> None:
        try:
            work.wait(deadline.left)
        except RuntimeError as failure:
            if deadline.is_over:
                raise RankLostError(self.peer, f"nothing was heard of it for {deadline.timeout_s:g} s") from failure
            raise self._lost() from failure

    def _lost(self) -> RankLostError:
        return RankLostError(self.peer, "its end of the connection is closed")

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._sending.clear()
        self._sent.clear()
        self._group = None
