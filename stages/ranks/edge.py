"""One connection of the control star: messages between two ranks over a gloo group of these two.

Each edge has a group of its own, because gloo gives up a whole group when one wait in it takes too long: the ranks that
are alive could not be told who is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import attrs
import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from streamflow.stages.ranks.errors import RankLostError

#: Tags of the two parts of a message.
_LENGTH, _BODY = 0, 1


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


@attrs.frozen
class Receipt:
    """A message that is awaited: the work that brings its length, and where that comes to."""

    length: torch.Tensor
    work: Work


class Pair(Protocol):
    """What is used of a gloo group of two; torch declares it nowhere."""

    def rank(self) -> int: ...

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int, /) -> Work: ...


class Edge:
    """This rank's end of a connection to rank ``peer``. For one thread at a time."""

    def __init__(self, group: Pair, peer: int) -> None:
        self.peer = peer
        self._group: Pair | None = group
        self._other = 1 - group.rank()
        self._sending: list[Work] = []
        self._sent: list[torch.Tensor] = []

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
        """Send ``message``, one byte or more, and do not wait until it is taken. The one before has been.

        :raises RankLostError: if the connection is closed.
        """
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        length = torch.tensor([body.numel()], dtype=torch.int64)
        group = self._open()
        self._sent = [length, body]
        try:
            self._sending = [group.send([part], self._other, tag) for part, tag in ((length, _LENGTH), (body, _BODY))]
        except RuntimeError as failure:
            raise self._lost() from failure

    def flush(self, deadline: Deadline) -> None:
        """Wait until what was sent is taken.

        :raises RankLostError: if it is not by ``deadline``, or the connection is closed.
        """
        for work in self._sending:
            self._wait(work, deadline)

    def expect(self) -> Receipt:
        """Be ready for a message; for `receive`.

        :raises RankLostError: if the connection is closed.
        """
        length = torch.zeros(1, dtype=torch.int64)
        return Receipt(length, self._begin_receiving(length, _LENGTH))

    def receive(self, receipt: Receipt, deadline: Deadline) -> bytes:
        """The message that is expected.

        :raises RankLostError: if it has not come by ``deadline``, or the connection is closed.
        """
        self._wait(receipt.work, deadline)
        body = bytearray(int(receipt.length.item()))
        self._wait(self._begin_receiving(torch.frombuffer(body, dtype=torch.uint8), _BODY), deadline)
        return bytes(body)

    def _begin_receiving(self, target: torch.Tensor, tag: int) -> Work:
        try:
            return self._open().recv([target], self._other, tag)
        except RuntimeError as failure:
            raise self._lost() from failure

    def _wait(self, work: Work, deadline: Deadline) -> None:
        try:
            work.wait(deadline.left)
        except RuntimeError as failure:
            if deadline.is_over:
                raise RankLostError(self.peer, f"nothing was heard of it for {deadline.timeout_s:g} s") from failure
            raise self._lost() from failure

    def _open(self) -> Pair:
        if self._group is None:
            raise RankLostError(self.peer, "the connection to it is closed on this side")
        return self._group

    def _lost(self) -> RankLostError:
        return RankLostError(self.peer, "its end of the connection is closed")

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._sending.clear()
        self._group = None
