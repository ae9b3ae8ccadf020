"""The residency ledger: what it decides, step by step, and what it promises, whatever the order of events."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.ledger import Lease, Moves, Presence, ResidencyLedger

SIZES = {"encoder": 6, "experts": 3, "vae": 4, "tiny": 0}


def settle(ledger: ResidencyLedger) -> list[Lease]:
    """Let everything that is decided happen; returns the leases granted on the way."""
    granted: list[Lease] = []
    while True:
        moves = ledger.decide()
        granted += moves.granted
        for name in moves.leave:
            ledger.left(name)
        for name in moves.arrive:
            ledger.arrived(name)
        if not moves.leave and not moves.arrive and not moves.granted:
            return granted


def test_a_component_comes_with_its_first_holder_and_goes_with_its_last() -> None:
    ledger = ResidencyLedger(SIZES, 10)
    ledger.ask(1, "encoder")
    assert ledger.decide() == Moves((), ("encoder",), (), ())
    assert ledger.decide() == Moves((), (), (), ())
    ledger.arrived("encoder")
    assert ledger.decide().granted == (Lease(1, "encoder"),)
    ledger.ask(2, "encoder")
    assert ledger.decide() == Moves((), (), (Lease(2, "encoder"),), ())
    ledger.release(1, "encoder")
    assert ledger.decide() == Moves((), (), (), ())
    ledger.release(2, "encoder")
    assert ledger.decide().leave == ("encoder",)
    assert ledger.used_bytes == 6
    ledger.left("encoder")
    assert (ledger.used_bytes, ledger.presence("encoder")) == (0, Presence.ABSENT)


def test_two_requests_in_different_stages_stay_inside_the_budget() -> None:
    ledger = ResidencyLedger(SIZES, 9)
    ledger.ask(1, "encoder")
    assert settle(ledger) == [Lease(1, "encoder")]
    ledger.ask(2, "vae")
    assert settle(ledger) == []
    assert ledger.num_waiting == 1
    ledger.release(1, "encoder")
    moves = ledger.decide()
    assert (moves.leave, moves.arrive) == (("encoder",), ())
    assert ledger.used_bytes == 6
    ledger.left("encoder")
    assert ledger.decide().arrive == ("vae",)


def test_nobody_overtakes_a_holder_that_waits_for_room() -> None:
    ledger = ResidencyLedger(SIZES, 9)
    ledger.ask(1, "encoder")
    assert settle(ledger) == [Lease(1, "encoder")]
    ledger.ask(2, "vae")
    ledger.ask(3, "encoder")
    ledger.ask(4, "tiny")
    assert settle(ledger) == []
    ledger.release(1, "encoder")
    assert settle(ledger) == [Lease(2, "vae")]
    ledger.release(2, "vae")
    assert {lease.holder for lease in settle(ledger)} == {3, 4}


def test_a_holder_that_withdraws_lets_the_next_one_in() -> None:
    ledger = ResidencyLedger(SIZES, 9)
    ledger.ask(1, "encoder")
    settle(ledger)
    ledger.ask(2, "vae")
    ledger.ask(3, "encoder")
    ledger.withdraw(2)
    assert settle(ledger) == [Lease(3, "encoder")]
    ledger.withdraw(1)
    ledger.withdraw(3)
    settle(ledger)
    assert ledger.used_bytes == 0


def test_a_holder_that_withdraws_while_its_component_comes_lets_it_go_again() -> None:
    ledger = ResidencyLedger(SIZES, 9)
    ledger.ask(1, "vae")
    assert ledger.decide().arrive == ("vae",)
    ledger.withdraw(1)
    assert ledger.decide() == Moves((), (), (), ())
    ledger.arrived("vae")
    assert ledger.decide() == Moves(("vae",), (), (), ())


def test_a_holder_that_withdraws_before_there_is_room_leaves_nothing() -> None:
    ledger = ResidencyLedger(SIZES, 9)
    ledger.ask(1, "encoder")
    settle(ledger)
    ledger.release(1, "encoder")
    ledger.ask(2, "vae")
    assert ledger.decide() == Moves(("encoder",), (), (), ())
    ledger.withdraw(2)
    ledger.left("encoder")
    assert ledger.decide() == Moves((), (), (), ())
    assert ledger.presence("vae") is Presence.ABSENT


def test_a_component_that_could_not_come_is_nobodys() -> None:
    ledger = ResidencyLedger(SIZES, 9)
    ledger.ask(1, "vae")
    ledger.ask(2, "vae")
    ledger.decide()
    assert ledger.failed("vae") == (1, 2)
    assert ledger.holders("vae") == frozenset()
    ledger.ask(1, "vae")
    assert settle(ledger) == [Lease(1, "vae")]


def test_what_is_kept_stays_until_somebody_asks_for_another() -> None:
    ledger = ResidencyLedger(SIZES, None)
    ledger.ask(1, "encoder", keep=True)
    settle(ledger)
    ledger.release(1, "encoder")
    assert ledger.decide() == Moves((), (), (), ())
    ledger.ask(2, "encoder", keep=True)
    assert ledger.decide().granted == (Lease(2, "encoder"),)
    ledger.withdraw(2)
    assert ledger.decide() == Moves((), (), (), ())
    ledger.ask(1, "vae")
    assert ledger.decide() == Moves(("encoder",), (), (), ())
    ledger.left("encoder")
    assert ledger.decide() == Moves((), ("vae",), (), ())


def test_the_last_lease_says_whether_a_component_is_kept() -> None:
    ledger = ResidencyLedger(SIZES, None)
    ledger.ask(1, "encoder", keep=True)
    ledger.ask(2, "encoder")
    settle(ledger)
    ledger.release(1, "encoder")
    ledger.release(2, "encoder")
    assert ledger.decide().leave == ("encoder",)


def test_what_is_kept_gives_way_only_to_another() -> None:
    ledger = ResidencyLedger(SIZES, 9)
    ledger.ask(1, "encoder", keep=True)
    settle(ledger)
    ledger.release(1, "encoder")
    ledger.ask(2, "experts")
    assert settle(ledger) == [Lease(2, "experts")]
    assert ledger.presence("encoder") is Presence.ABSENT


def test_a_nested_holder_is_served_at_once_where_there_is_room() -> None:
    ledger = ResidencyLedger(SIZES, 10)
    ledger.ask(1, "encoder")
    settle(ledger)
    ledger.ask(2, "encoder")
    ledger.ask(1, "vae")
    assert set(settle(ledger)) == {Lease(2, "encoder"), Lease(1, "vae")}


def test_a_nested_holder_is_refused_rather_than_left_to_wait_for_others() -> None:
    ledger = ResidencyLedger(SIZES, 9)
    ledger.ask(1, "encoder")
    settle(ledger)
    ledger.ask(1, "vae")
    assert ledger.decide().refused == (Lease(1, "vae"),)
    assert ledger.num_waiting == 0
    assert ledger.holders("encoder") == {1}


def test_a_component_larger_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder takes 6 bytes, more than the budget of 5"):
        ResidencyLedger(SIZES, 5)


def test_asking_twice_is_an_error() -> None:
    ledger = ResidencyLedger(SIZES, None)
    ledger.ask(1, "vae")
    with pytest.raises(ValueError, match="waits for, or has"):
        ledger.ask(1, "encoder")
    settle(ledger)
    with pytest.raises(ValueError, match="waits for, or has"):
        ledger.ask(1, "vae")


@attrs.define
class Trip:
    """A holder's way through the components, one after the other; each may be kept when it goes on."""

    stops: list[tuple[str, bool]]
    where: str | None = None
    is_waiting: bool = False


class World:
    """Requests that go their ways in any order, and transfers that end in any order."""

    def __init__(self, trips: list[Trip], budget: int | None) -> None:
        self.ledger = ResidencyLedger(SIZES, budget)
        self.budget = budget
        self.trips = dict(enumerate(trips))
        self.coming: list[str] = []
        self.going: list[str] = []

    def choices(self) -> Iterator[tuple[str, object]]:
        """What could happen next."""
        for name in self.coming:
            yield "arrived", name
            yield "failed", name
        for name in self.going:
            yield "left", name
        for number, trip in self.trips.items():
            if trip.where is not None:
                yield "done", number
            elif trip.stops and not trip.is_waiting:
                yield "ask", number
            elif trip.is_waiting:
                yield "give up", number

    def happen(self, what: str, which: object) -> None:
        if what in ("arrived", "failed"):
            self.coming.remove(str(which))
            if what == "arrived":
                self.ledger.arrived(str(which))
            else:
                for holder in self.ledger.failed(str(which)):
                    self.stop_waiting(holder)
        elif what == "left":
            self.going.remove(str(which))
            self.ledger.left(str(which))
        else:
            assert isinstance(which, int)
            self.move(what, which)
        self.act(self.ledger.decide())

    def move(self, what: str, number: int) -> None:
        trip = self.trips[number]
        if what == "ask":
            trip.is_waiting = True
            component, keep = trip.stops[0]
            self.ledger.ask(number, component, keep=keep)
        elif what == "give up":
            self.ledger.withdraw(number)
            self.stop_waiting(number)
        else:
            self.leave(number, trip)

    def leave(self, number: int, trip: Trip) -> None:
        assert trip.where is not None
        trip.stops.pop(0)
        self.ledger.release(number, trip.where)
        trip.where = None

    def stop_waiting(self, number: int) -> None:
        self.trips[number].is_waiting = False
        self.trips[number].stops.pop(0)

    def act(self, moves: Moves, but: int | None = None) -> None:
        for name in moves.leave:
            assert not any(trip.where == name for trip in self.trips.values()), "moved under a holder"
            self.going.append(name)
        self.coming += moves.arrive
        for lease in (lease for lease in moves.granted if lease.holder != but):
            trip = self.trips[lease.holder]
            assert trip.is_waiting
            assert trip.stops[0][0] == lease.component
            assert lease.component not in (*self.coming, *self.going)
            trip.where, trip.is_waiting = lease.component, False
        assert not moves.refused
        assert self.budget is None or self.ledger.used_bytes <= self.budget


STOPS = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.booleans()), max_size=4)


@given(st.lists(STOPS, max_size=5), st.sampled_from([6, 7, 9, 13, None]), st.data())
def test_every_holder_gets_through_within_the_budget(
    routes: list[list[tuple[str, bool]]], budget: int | None, data: st.DataObject
) -> None:
    world = World([Trip(list(stops)) for stops in routes], budget)
    while choices := list(world.choices()):
        likely = [choice for choice in choices if choice[0] not in ("failed", "give up")]
        # nothing but accidents left to happen: somebody waits for what will never come
        assert likely, "a deadlock"
        world.happen(*data.draw(st.sampled_from(likely + choices)))
    assert not any(trip.stops or trip.is_waiting for trip in world.trips.values())
    assert world.ledger.num_waiting == 0
    world.ledger.ask(99, "tiny")  # nobody keeps anything then but what is asked for
    world.act(world.ledger.decide(), but=99)
    assert world.ledger.used_bytes == sum(SIZES[name] for name in world.going)


@given(st.lists(st.sampled_from(sorted(SIZES)), max_size=6), st.sampled_from([6, 9, None]))
def test_leases_are_granted_in_the_order_in_which_they_were_asked_for(asked: list[str], budget: int | None) -> None:
    """With one transfer at a time and nobody leaving early: the first who waits is the first to be admitted."""
    ledger = ResidencyLedger(SIZES, budget)
    for holder, component in enumerate(asked):
        ledger.ask(holder, component)
    order: list[int] = []
    while len(order) < len(asked):
        granted = settle(ledger)
        assert granted
        batch = [lease.holder for lease in granted]
        assert max(batch) - min(batch) + 1 == len(batch)
        assert not order or min(batch) > max(order)
        order += batch
        for lease in granted:
            ledger.release(lease.holder, lease.component)
    assert sorted(order) == list(range(len(asked)))
