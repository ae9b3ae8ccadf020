"""The residency ledger: which components are on the device, for whom, and who waits. Pure: no torch, no clock.

A component is on the device while somebody holds a lease on it; a lease belongs to one holder (a request) and the
component leaves with the last. The ledger lives on the event loop: it is told who asks and who is done, and what the
transfers did; `decide` then says what is to come and go. Its promises, held by property tests:

- what is on the device, coming, or still going never exceeds the budget;
- a component moves only while nobody holds it, and a walk runs only under a lease;
- who asks is served in order: nobody overtakes a holder that waits for room;
- a holder that waits holds nothing, so no two wait for each other. Where one asks from inside a component (nested), it
  is answered at once or as soon as something that goes already is gone: it never waits for another holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

import attrs


class Presence(Enum):
    """Where a component is. ``ADMITTED``: room is kept for it, and what has to go first is going."""

    ABSENT = "absent"
    ADMITTED = "admitted"
    ARRIVING = "arriving"
    PRESENT = "present"
    LEAVING = "leaving"


#: On the device, in whole or in part.
_THERE = (Presence.ARRIVING, Presence.PRESENT, Presence.LEAVING)
#: There to stay, or about to be.
_STAYING = (Presence.ADMITTED, Presence.ARRIVING, Presence.PRESENT)


@attrs.frozen
class Lease:
    """The right of ``holder`` to use ``component``, which stays where it is meanwhile."""

    holder: int
    component: str


@attrs.frozen
class Moves:
    """What to do now, in this order. Each of ``leave`` and ``arrive`` is answered by `left`, `arrived` or `failed`.

    ``refused``: asked for from inside another component, and there is no room beside what others hold.
    """

    leave: tuple[str, ...]
    arrive: tuple[str, ...]
    granted: tuple[Lease, ...]
    refused: tuple[Lease, ...]


@attrs.define
class _Holding:
    nbytes: int
    presence: Presence = Presence.ABSENT
    holders: set[int] = attrs.field(factory=set)
    told: set[int] = attrs.field(factory=set)
    keepers: set[int] = attrs.field(factory=set)
    is_kept: bool = False
    is_told_to_leave: bool = False

    @property
    def can_leave(self) -> bool:
        return self.presence is Presence.PRESENT and not self.holders


class ResidencyLedger:
    """Decides over components of ``component_bytes`` within ``budget_bytes`` (None: no limit).

    :raises ValueError: if one component alone exceeds the budget: it could never come.
    """

    def __init__(self, component_bytes: Mapping[str, int], budget_bytes: int | None = None) -> None:
        self._holdings = {name: _Holding(nbytes) for name, nbytes in component_bytes.items()}
        self._budget = budget_bytes
        self._waiting: dict[int, str] = {}
        for name, nbytes in component_bytes.items():
            if budget_bytes is not None and nbytes > budget_bytes:
                raise ValueError(f"{name} takes {nbytes:,} bytes, more than the budget of {budget_bytes:,}")

    @property
    def used_bytes(self) -> int:
        """Bytes of what is on the device, coming or going."""
        return self._bytes_of(_THERE)

    @property
    def num_waiting(self) -> int:
        """Holders that wait."""
        return len(self._waiting)

    def presence(self, component: str) -> Presence:
        """Where the component is."""
        return self._holdings[component].presence

    def holders(self, component: str) -> frozenset[int]:
        """Who has a lease on it, or will have one when it is there."""
        return frozenset(self._holdings[component].holders)

    def held_by(self, holder: int) -> tuple[str, ...]:
        """What ``holder`` has a lease on, or will have one when it is there."""
        return tuple(name for name, holding in self._holdings.items() if holder in holding.holders)

    # What holders did

    def ask(self, holder: int, component: str, *, keep: bool = False) -> None:
        """``holder`` waits for a lease on ``component``. It waits for one at a time, and holds it once.

        ``keep``: when this lease was the last, the component stays until somebody asks for another one.

        :raises ValueError: if it waits already, or has that lease.
        """
        if holder in self._waiting or holder in self._holdings[component].holders:
            raise ValueError(f"holder {holder} waits for, or has, {component} already")
        self._waiting[holder] = component
        if keep:
            self._holdings[component].keepers.add(holder)
        for name, holding in self._holdings.items():
            if name != component:
                holding.is_kept = False

    def release(self, holder: int, component: str) -> None:
        """The lease, or the wait for it, ends. Idempotent."""
        if self._waiting.get(holder) == component:
            del self._waiting[holder]
        holding = self._holdings[component]
        if holder in holding.holders:
            holding.holders.discard(holder)
            holding.is_kept = holder in holding.keepers and not holding.holders
        holding.told.discard(holder)
        holding.keepers.discard(holder)

    def withdraw(self, holder: int) -> None:
        """``holder`` is gone: it waits for nothing and all its leases end. Idempotent."""
        for name in self._holdings:
            self.release(holder, name)

    # What transfers did

    def arrived(self, component: str) -> None:
        """All of the component is on its way to the device, or there."""
        self._holdings[component].presence = Presence.PRESENT

    def left(self, component: str) -> None:
        """Its device memory is free again."""
        holding = self._holdings[component]
        holding.presence, holding.is_told_to_leave = Presence.ABSENT, False

    def failed(self, component: str) -> tuple[int, ...]:
        """It could not come, and nothing of it is left. Returns who was to have it; they have it no more."""
        holding = self._holdings[component]
        holding.presence = Presence.ABSENT
        disappointed = tuple(sorted(holding.holders))
        holding.holders.clear()
        holding.keepers.clear()
        return disappointed

    # The decision

    def decide(self) -> Moves:
        """What is to be done after all that was told; doing it is assumed from here on."""
        refused = tuple(self._admit_nested())
        self._admit_in_order()
        leave = tuple(self._leave())
        arrive = tuple(self._arrive())
        return Moves(leave, arrive, tuple(self._grant()), refused)

    def _admit_nested(self) -> Iterator[Lease]:
        for holder, component in list(self._waiting.items()):
            if not self._holds_any(holder) or self._admit(holder, component):
                continue
            if self._holdings[component].presence is not Presence.LEAVING:
                del self._waiting[holder]
                yield Lease(holder, component)

    def _admit_in_order(self) -> None:
        for holder, component in list(self._waiting.items()):
            if not self._holds_any(holder) and not self._admit(holder, component):
                return

    def _admit(self, holder: int, component: str) -> bool:
        holding = self._holdings[component]
        if holding.presence is Presence.LEAVING:
            return False
        if holding.presence is Presence.ABSENT:
            if not self._has_room(holding.nbytes):
                return False
            holding.presence = Presence.ADMITTED
            self._make_room()  # now, so that nobody who waits behind takes a lease on what has to go
        holding.holders.add(holder)
        holding.is_kept = False
        del self._waiting[holder]
        return True

    def _has_room(self, nbytes: int) -> bool:
        staying = sum(h.nbytes for h in self._holdings.values() if h.presence in _STAYING and not h.can_leave)
        return self._budget is None or staying + nbytes <= self._budget

    def _make_room(self) -> None:
        for holding in self._holdings.values():
            if self._budget is not None and self._bytes_of(_STAYING) > self._budget and holding.can_leave:
                holding.presence = Presence.LEAVING

    def _leave(self) -> Iterator[str]:
        for name, holding in self._holdings.items():
            if holding.presence is Presence.ADMITTED and not holding.holders:
                holding.presence = Presence.ABSENT
            if holding.can_leave and not holding.is_kept:
                holding.presence = Presence.LEAVING
            if holding.presence is Presence.LEAVING and not holding.is_told_to_leave:
                holding.is_told_to_leave = True
                yield name

    def _arrive(self) -> Iterator[str]:
        for name, holding in self._holdings.items():
            if holding.presence is not Presence.ADMITTED:
                continue
            if self._has_come_free(holding.nbytes):
                holding.presence = Presence.ARRIVING
                yield name

    def _has_come_free(self, nbytes: int) -> bool:
        """Whether there is room now. Without a budget nothing comes while something goes: memory may be short, too."""
        if self._budget is None:
            return all(holding.presence is not Presence.LEAVING for holding in self._holdings.values())
        return self.used_bytes + nbytes <= self._budget

    def _grant(self) -> Iterator[Lease]:
        for name, holding in self._holdings.items():
            if holding.presence is Presence.PRESENT:
                for holder in sorted(holding.holders - holding.told):
                    holding.told.add(holder)
                    yield Lease(holder, name)

    def _bytes_of(self, presences: Iterable[Presence]) -> int:
        return sum(holding.nbytes for holding in self._holdings.values() if holding.presence in presences)

    def _holds_any(self, holder: int) -> bool:
        return bool(self.held_by(holder))
