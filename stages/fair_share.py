"""Whose turn it is on a shared link. Pure: no torch, no clock.

Start-time fair queueing: every ask gets a tag on a virtual time line, where the members' bytes lie one after the other,
each member's on a line of its own; the lowest tag is served first. Members that always have something to ask for get
equal bytes, up to one ask of each, however large their asks are; who asks for nothing saves nothing up.
"""

from __future__ import annotations

from collections import deque

import attrs

#: Asks that are under way at most while members share the link: one moves, and one is ready to follow.
MAX_UNDER_WAY = 2


@attrs.define
class _Member:
    asks: deque[int] = attrs.field(factory=deque)
    num_counted: int = 0
    last_tag: int = 0


class FairShare:
    """Grants asks of members, which are any integers. One owner, one thread at a time."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._now = 0

    @property
    def num_members(self) -> int:
        """Members that joined and did not leave."""
        return len(self._members)

    def join(self, member: int) -> None:
        """``member`` may ask from now on."""
        self._members[member] = _Member(last_tag=self._now)

    def leave(self, member: int) -> None:
        """``member`` is gone, with all that it asked for and was granted. Idempotent."""
        self._members.pop(member, None)

    def ask(self, member: int, nbytes: int) -> None:
        """``member`` wants to move so much, after all that it asked for before."""
        state = self._members[member]
        if not state.asks:
            state.last_tag = max(state.last_tag, self._now)
        state.asks.append(nbytes)

    def grant(self) -> tuple[int, bool] | None:
        """The member whose oldest ask is next, and whether it has to say when that is `done`; None: nobody's now.

        A member that is alone gets everything at once, and need not say.
        """
        is_shared = len(self._members) > 1
        if is_shared and sum(state.num_counted for state in self._members.values()) >= MAX_UNDER_WAY:
            return None
        asking = [(state.last_tag, member) for member, state in self._members.items() if state.asks]
        if not asking:
            return None
        self._now, member = min(asking)
        state = self._members[member]
        state.last_tag += state.asks.popleft()
        state.num_counted += is_shared
        return member, is_shared

    def done(self, member: int) -> None:
        """What was granted to ``member`` while others shared the link has moved."""
        if member in self._members:
            self._members[member].num_counted -= 1
