"""The control star over gloo: the coordinating rank has an edge to each other one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from torch.distributed.distributed_c10d import Store

from streamflow.stages.ranks.control import COORDINATING, Control
from streamflow.stages.ranks.edge import Deadline, Edge
from streamflow.stages.ranks.errors import RankLostError
from streamflow.stages.ranks.meeting import Meeting
from streamflow.stages.threads import ThreadCrew

#: How long ranks wait for one that still loads its model.
ARRIVAL_S = 300.0


class GlooStar:
    """One rank's end of the star; see `Control`. Made by `open_star`."""

    def __init__(self, rank: int, size: int, edges: Sequence[Edge]) -> None:
        self.rank, self.size = rank, size
        self._edges = {edge.peer: edge for edge in edges}

    def add(self, edge: Edge) -> None:
        """Take ``edge`` over."""
        self._edges[edge.peer] = edge

    def welcome(self, lost: RankLostError | None, timeout_s: float) -> None:
        """Tell all that are connected that everybody is, or who is lost."""
        message = json.dumps(lost and [lost.rank, lost.reason]).encode()
        self.answer(dict.fromkeys(self._edges, message))
        self.flush(timeout_s)

    def collect(self, timeout_s: float) -> list[bytes]:
        deadline = Deadline.after(timeout_s)
        receipts = [(edge, edge.expect()) for edge in self._edges.values()]
        return [edge.receive(receipt, deadline) for edge, receipt in receipts]

    def answer(self, replies: Mapping[int, bytes]) -> None:
        for rank, reply in replies.items():
            with suppress(RankLostError):
                self._edges[rank].send(reply)

    def flush(self, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s)
        for edge in self._edges.values():
            with suppress(RankLostError):
                edge.flush(deadline)

    def report(self, status: bytes, timeout_s: float) -> bytes:
        edge = self._edges[COORDINATING]
        edge.send(status)
        return edge.receive(edge.expect(), Deadline.after(timeout_s))

    def close(self) -> None:
        for edge in self._edges.values():
            edge.close()


@asynccontextmanager
async def open_star(
    crew: ThreadCrew,
    store: Store,
    name: str,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    arrival_s: float = ARRIVAL_S,
) -> AsyncIterator[Control]:
    """This rank's end of a new star of ``size`` ranks, 2 or more, which all open one of this ``name``, one at a time.

    Ranks that are not there yet are waited for ``arrival_s``; connecting may take ``timeout_s`` then.

    :raises RankLostError: if a rank does not come, or dies meanwhile.
    """
    meeting = Meeting(store, name, rank, size)

    def connect() -> GlooStar:
        place = meeting.meet(arrival_s)
        if rank == COORDINATING:
            return _connect_all(store, place, size, timeout_s)
        return _connect_one(store, place, rank, size, timeout_s)

    star = await crew.call(connect, undo=GlooStar.close, on_cancel=meeting.give_up, name="meeting of ranks")
    try:
        yield star
    finally:
        await crew.call_through(star.close)


def _connect_all(store: Store, place: str, size: int, timeout_s: float) -> GlooStar:
    """All edges; the ranks at their other ends are told once they are there, or who is lost."""
    star = GlooStar(COORDINATING, size, [])
    try:
        for rank in range(1, size):
            star.add(Edge.connect(store, f"{place}/{rank}", end=0, peer=rank, timeout_s=timeout_s))
    except RankLostError as lost:
        star.welcome(lost, timeout_s)
        star.close()
        raise
    star.welcome(None, timeout_s)
    return star


def _connect_one(store: Store, place: str, rank: int, size: int, timeout_s: float) -> GlooStar:
    edge = Edge.connect(store, f"{place}/{rank}", end=1, peer=COORDINATING, timeout_s=timeout_s)
    # the coordinating rank may be waiting for another one
    lost = json.loads(edge.receive(edge.expect(), Deadline.after(2 * timeout_s)))
    if lost is not None:
        edge.close()
        raise RankLostError(*lost)
    return GlooStar(rank, size, [edge])
