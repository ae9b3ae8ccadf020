"""Who walks with whom, and when: requests of any rhythm on a planner whose clock is the test's."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamflow.stages.decisions import Walk
from streamflow.stages.returns import MAX_SHARE_OF_WALK
from streamflow.stages.walk_sources import SharedWalks, WaitingPass
from streamflow.stages.walks import WalkPlanner

WALK_S = 1.0


@attrs.frozen
class Rhythm:
    """A request: when it begins, the component of each of its passes, and the time between two of them."""

    begins_at: float
    components: tuple[str, ...]
    gap_s: float
    lag_s: float = 0.0


@attrs.define
class Waited:
    """A pass that began to wait ``since`` then, behind so many, and how many walks began before its own."""

    since: float
    num_ahead: int
    num_walks_before: int = 0


class Simulation:
    """Requests whose passes take a walk's time (and ``lag_s`` more), on a planner without blocks."""

    def __init__(self, source: SharedWalks, rhythms: Sequence[Rhythm]) -> None:
        self.planner = WalkPlanner({"a": (), "b": ()}, 0, source)
        self.rhythms = rhythms
        self.walks: list[Walk] = []
        self.sizes: list[int] = []
        self.waits: list[Waited] = []
        self.idle_s: list[float] = []
        self._waiting: dict[int, Waited] = {}
        self._maker_of: dict[int, int] = {}
        self._left = [list(rhythm.components) for rhythm in rhythms]
        self._ids = itertools.count()
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, int]] = []
        self._idle_since: float | None = None
        for maker, rhythm in enumerate(rhythms):
            self._at(rhythm.begins_at, "begin", maker)

    def _at(self, when: float, what: str, number: int) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, number))

    def run(self) -> Simulation:
        """Until all requests are over."""
        while self._events:
            now, _, what, number = heapq.heappop(self._events)
            if what == "begin":
                self._begin(number, now)
            elif what == "end":
                self._end(number, now)
            self._decide(now)
        assert not self._waiting, "a pass waits for ever"
        return self

    def _begin(self, maker: int, now: float) -> None:
        pass_id = next(self._ids)
        self._maker_of[pass_id] = maker
        self._waiting[pass_id] = Waited(now, len(self._waiting))
        self.planner.join(pass_id, self._left[maker].pop(0), maker=maker, now=now)

    def _end(self, pass_id: int, now: float) -> None:
        maker = self._maker_of[pass_id]
        self.planner.end(pass_id, completed=True, now=now)
        if self._left[maker]:
            self._at(now + self.rhythms[maker].gap_s, "begin", maker)
        else:
            self.planner.gone(maker)

    def _decide(self, now: float) -> None:
        decision = self.planner.decide(now)
        if decision.ended is not None:
            self._idle_since = now
        started = decision.started.pass_ids if decision.started is not None else ()
        if decision.started is not None:
            self.walks.append(decision.started)
            self.sizes.append(0)
            self._note_idle(now, started)
        for pass_id in (*started, *decision.joined):
            self.sizes[-1] += 1
            self.waits.append(self._waiting.pop(pass_id))
            self._at(now + WALK_S + self.rhythms[self._maker_of[pass_id]].lag_s, "end", pass_id)
        if started:
            for waited in self._waiting.values():
                waited.num_walks_before += 1
        if decision.again_at is not None:
            assert decision.again_at > now
            self._at(decision.again_at, "decide", 0)

    def _note_idle(self, now: float, started: Sequence[int]) -> None:
        began_to_wait = min(self._waiting[pass_id].since for pass_id in started)
        self.idle_s.append(now - max(began_to_wait, self._idle_since or 0.0))


class PunctualWalks(SharedWalks):
    """Nobody joins late: the planner here has no blocks, so that every walk seems to be at its beginning."""

    def late_joins(self, waiting: Sequence[WaitingPass], component: str, num_walking: int) -> tuple[int, ...]:
        return ()


def steady(num: int, gap_s: float = 0.01, num_passes: int = 10, component: str = "a") -> list[Rhythm]:
    """Requests of one component that begin at odd times."""
    return [Rhythm(0.37 * maker, (component,) * num_passes, gap_s, 0.003 * maker) for maker in range(num)]


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.1, 0.4])
@pytest.mark.parametrize("source", [SharedWalks, PunctualWalks])
def test_steady_requests_fall_into_step_without_an_admission_window(
    source: type[SharedWalks], num: int, gap_s: float
) -> None:
    simulation = Simulation(source(max_passes=num), steady(num, gap_s)).run()
    assert simulation.sizes[3:9] == [num] * 6


def test_a_request_that_is_away_for_longer_than_half_a_walk_holds_up_nobody_after_its_first_time() -> None:
    quick, slow = Rhythm(0.0, ("a",) * 20, 0.001), Rhythm(0.0, ("a",) * 5, 0.9)
    simulation = Simulation(PunctualWalks(2), [quick, slow]).run()
    assert sum(simulation.idle_s) < 0.2


def test_a_new_request_joins_at_the_next_pass_and_not_when_others_are_done() -> None:
    first = Rhythm(0.0, ("a",) * 10, 0.01)
    simulation = Simulation(PunctualWalks(2), [first, Rhythm(2.5, ("a",) * 2, 0.01)]).run()
    assert simulation.sizes == [1, 1, 1, 2, 2, *[1] * 5]


def test_two_components_take_turns() -> None:
    simulation = Simulation(SharedWalks(4), [*steady(2), *steady(2, component="b")]).run()
    components = [walk.component for walk in simulation.walks[:12]]
    assert all(one != next_ for one, next_ in itertools.pairwise(components))
    assert simulation.sizes[4:12] == [2] * 8


def test_no_more_passes_than_allowed_walk_together_and_all_get_their_turn() -> None:
    simulation = Simulation(SharedWalks(2), steady(5)).run()
    assert max(simulation.sizes) == 2
    assert len(simulation.waits) == 50


def test_the_first_pass_waits_for_others_as_long_as_the_admission_window_and_no_longer() -> None:
    alone = Simulation(SharedWalks(4, window_s=0.25), [Rhythm(0.0, ("a",), 0.0)]).run()
    assert [walk.started_at for walk in alone.walks] == [0.25]
    late = Rhythm(0.2, ("a",), 0.0)
    assert Simulation(SharedWalks(4, window_s=0.25), [Rhythm(0.0, ("a",), 0.0), late]).run().sizes == [2]
    full = Simulation(SharedWalks(2, window_s=0.25), [Rhythm(0.0, ("a",), 0.0), late]).run()
    assert [walk.started_at for walk in full.walks] == [0.2]


def test_who_comes_while_a_walk_is_at_its_beginning_joins_it_unless_another_component_waits() -> None:
    first, second = Rhythm(0.0, ("a",), 0.0), Rhythm(0.5, ("a",), 0.0)
    assert Simulation(SharedWalks(2), [first, second]).run().sizes == [2]
    assert Simulation(SharedWalks(1), [first, second]).run().sizes == [1, 1]
    other = Rhythm(0.4, ("b",), 0.0)
    assert Simulation(SharedWalks(3), [first, second, other]).run().sizes == [1, 1, 1]


RHYTHMS = st.lists(
    st.builds(
        Rhythm,
        begins_at=st.floats(0, 5),
        components=st.lists(st.sampled_from("ab"), min_size=1, max_size=6).map(tuple),
        gap_s=st.sampled_from([0.0, 0.001, 0.1, 0.45, 0.6, 3.0]),
        lag_s=st.sampled_from([0.0, 0.01, 0.7]),
    ),
    min_size=1,
    max_size=6,
)


@given(st.sampled_from([SharedWalks, PunctualWalks]), RHYTHMS, st.integers(1, 4), st.sampled_from([0.0, 0.2]))
@settings(max_examples=150, deadline=None)
def test_nobody_starves_and_the_link_is_never_idle_for_long(
    source: type[SharedWalks], rhythms: list[Rhythm], max_passes: int, window_s: float
) -> None:
    simulation = Simulation(source(max_passes, window_s), rhythms).run()
    assert len(simulation.waits) == sum(len(rhythm.components) for rhythm in rhythms)
    for waited in simulation.waits:
        assert waited.num_walks_before <= waited.num_ahead + 1  # those ahead, and the walk that was under way
    longest_walk_s = WALK_S + 2 * 0.7 + 0.01
    assert max(simulation.idle_s) <= max(window_s, MAX_SHARE_OF_WALK * longest_walk_s) + 1e-6
    assert max(simulation.sizes) <= max_passes
