"""How ranks find each other again, each time anew, through the store that torch.distributed was started with.

torch names a new group by how many groups each of its ranks has, and finds the addresses of a group of the same name
that is gone. Names made here are used once, whatever came before on any of the ranks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from streamflow.stages.ranks.errors import RankLostError

#: How often the store is asked whether somebody has come.
POLL_S = 0.02


def default_store() -> Store:
    """The store of ``torch.distributed.init_process_group``.

    :raises ValueError: if it was not called.
    """
    store: Store = distributed_c10d._get_default_store()
    return store


class Meeting:
    """The ranks 0 to ``size`` - 1 of ``name`` meet. For one thread; `give_up` ends it from any other.

    Each arrival of a rank has a number of its own. Rank 0 answers the newest of each: what they meet as, or who did not
    come.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Let `meet` raise."""
        self._given_up.set()

    def meet(self, timeout_s: float) -> str:
        """A name that all these ranks get and that nobody ever had.

        :raises RankLostError: if a rank is not here after ``timeout_s``, or this one gave up.
        """
        wait = _Wait(self._given_up, timeout_s)
        return self._meet_all(wait) if self._rank == 0 else self._meet_first(wait)

    def _meet_all(self, wait: _Wait) -> str:
        for rank in range(1, self._size):
            try:
                wait.until(partial(self._is_here, rank), rank)
            except RankLostError as lost:
                self._answer(None, lost)
                raise
        name = f"{self._name}/{self._store.add(f'{self._name}/meetings', 1)}"
        self._answer(name, None)
        return name

    def _answer(self, name: str | None, lost: RankLostError | None) -> None:
        answer = json.dumps([name, lost and [lost.rank, lost.reason]])
        for rank in range(1, self._size):
            if self._is_here(rank):
                newest = self._number("came", rank)
                self._store.add(self._key("met", rank), newest - self._number("met", rank))
                self._store.set(self._key("answer", rank, newest), answer)

    def _is_here(self, rank: int) -> bool:
        """Whether ``rank`` waits for an answer."""
        newest = self._number("came", rank)
        return newest > self._number("met", rank) and not self._store.check([self._key("left", rank, newest)])

    def _meet_first(self, wait: _Wait) -> str:
        number = self._store.add(self._key("came", self._rank), 1)
        answered = self._key("answer", self._rank, number)
        try:
            wait.until(lambda: self._store.check([answered]), 0)
        except RankLostError:
            self._store.set(self._key("left", self._rank, number), "")
            raise
        name, lost = json.loads(self._store.get(answered))
        if lost is not None:
            raise RankLostError(*lost)
        return str(name)

    def _number(self, what: str, rank: int) -> int:
        return int(self._store.add(self._key(what, rank), 0))

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._name, *parts)))


class _Wait:
    """Waiting for other ranks, until a time or until this one gives up."""

    def __init__(self, given_up: threading.Event, timeout_s: float) -> None:
        self._given_up, self._timeout_s = given_up, timeout_s
        self._until = time.monotonic() + timeout_s

    def until(self, is_there: Callable[[], bool], rank: int) -> None:
        """Return once ``is_there`` says so.

        :raises RankLostError: of ``rank``, if it does not in time.
        """
        while not is_there():
            if self._given_up.wait(POLL_S):
                raise RankLostError(rank, "this rank gave up waiting for it")
            if time.monotonic() >= self._until:
                raise RankLostError(rank, f"it did not come to open its offload in {self._timeout_s:g} s")
