"""How ranks find each other again, each time anew, through the store that torch.distributed was started with.

torch names a new group by how many groups each of its ranks has, and finds the addresses of a group of the same name
that is gone. Names made here are used once, whatever came before on any of the ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
    """The ranks 0 to ``size`` - 1 of ``name`` meet. For a thread; `give_up` ends it from any other."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Let `meet` raise."""
        self._given_up.set()

    def meet(self, timeout_s: float) -> str:
        """A name that all these ranks get and that nobody ever had.

        A rank that gave up at an earlier meeting, and did not come again, is taken for one that is here.

        :raises RankLostError: if a rank (for others than rank 0: rank 0) is not here after ``timeout_s``.
        """
        until = time.monotonic() + timeout_s
        if self._rank == 0:
            return self._gather_all(until, timeout_s)
        number = self._store.add(self._key("came", self._rank), 1)
        answer = f"{self._key('answer', self._rank)}/{number}"
        self._poll(lambda: self._store.check([answer]), 0, until, timeout_s)
        return self._store.get(answer).decode()

    def _gather_all(self, until: float, timeout_s: float) -> str:
        newest = {rank: self._wait_for(rank, until, timeout_s) for rank in range(1, self._size)}
        name = f"{self._name}/{self._store.add(f'{self._name}/meetings', 1)}"
        for rank, number in newest.items():
            self._store.add(self._key("met", rank), number - self._num_met(rank))
            self._store.set(f"{self._key('answer', rank)}/{number}", name)
        return name

    def _wait_for(self, rank: int, until: float, timeout_s: float) -> int:
        """The number of the newest arrival of ``rank``, which no meeting has had."""
        self._poll(lambda: self._num_came(rank) > self._num_met(rank), rank, until, timeout_s)
        return self._num_came(rank)

    def _num_came(self, rank: int) -> int:
        return int(self._store.add(self._key("came", rank), 0))

    def _num_met(self, rank: int) -> int:
        return int(self._store.add(self._key("met", rank), 0))

    def _poll(self, is_there: Callable[[], bool], rank: int, until: float, timeout_s: float) -> None:
        while not is_there():
            if self._given_up.wait(POLL_S):
                raise RankLostError(rank, "this rank gave up waiting for it")
            if time.monotonic() >= until:
                raise RankLostError(rank, f"it did not come to open its offload in {timeout_s:g} s")

    def _key(self, what: str, rank: int) -> str:
        return f"{self._name}/{what}/{rank}"
