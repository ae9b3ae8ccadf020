"""The host link of a device, shared by all engines of the process that move blocks over it.

An arbiter exists for each link as long as somebody uses it. An engine that is alone gets its turns at once; beside
others it waits for them, so that blocks queue here, where they can be put in a fair order, and not on the device.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from streamflow.stages.fair_share import FairShare

_arbiters: dict[Hashable, LinkArbiter] = {}
_arbiters_lock = threading.Lock()


class LinkArbiter:
    """Decides for one link. Thread-safe: its members may be on different event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shares = FairShare()
        self._numbers = itertools.count()
        self._users: dict[int, LinkUser] = {}

    def join(self, on_turn: Callable[[], object]) -> LinkUser:
        """A new user. ``on_turn`` is called from any thread when it got a turn that does not follow from its own asking
        at once; it must not block.
        """
        user = LinkUser(self, next(self._numbers), on_turn)
        with self._lock:
            self._users[user.number] = user
            self._shares.join(user.number)
        return user

    def change(self, user: LinkUser, change: Callable[[FairShare], object], *, looks_itself: bool = False) -> None:
        """Let ``user`` change the shares, and hand out the turns that follow. ``looks_itself``: it need not be told."""
        told: dict[int, LinkUser] = {}
        with self._lock:
            if user.number in self._users:  # else it is gone, and all that it had
                change(self._shares)
            while (granted := self._shares.grant()) is not None:
                number, is_counted = granted
                told[number] = self._users[number]
                told[number].turns.append(is_counted)
        for granted_user in told.values():  # perhaps one of them is leaving just now
            if not (looks_itself and granted_user is user):
                granted_user.on_turn()

    def leave(self, user: LinkUser) -> bool:
        """Forget ``user``; returns whether it was the last one. Its turns go to others."""
        self.change(user, lambda shares: shares.leave(user.number))
        with self._lock:
            self._users.pop(user.number, None)
            return not self._users


class LinkUser:
    """An engine's part of a link. ``turns``: those it did not take yet, each with whether to say when it is done."""

    def __init__(self, arbiter: LinkArbiter, number: int, on_turn: Callable[[], object]) -> None:
        self.number = number
        self.on_turn = on_turn
        self.turns: deque[bool] = deque()
        self._arbiter = arbiter

    def ask(self, nbytes: int) -> None:
        """Ask for a turn to move ``nbytes``; look into `turns` then."""
        self._arbiter.change(self, lambda shares: shares.ask(self.number, nbytes), looks_itself=True)

    def done(self) -> None:
        """A turn that is to be told of is over. From any thread."""
        self._arbiter.change(self, lambda shares: shares.done(self.number))


@contextmanager
def join_link(link: Hashable, on_turn: Callable[[], object]) -> Iterator[LinkUser]:
    """A user of ``link``; equal values are one link. With its last user, the arbiter goes."""
    with _arbiters_lock:
        arbiter = _arbiters.setdefault(link, LinkArbiter())
        user = arbiter.join(on_turn)
    try:
        yield user
    finally:
        with _arbiters_lock:
            if arbiter.leave(user):
                del _arbiters[link]
