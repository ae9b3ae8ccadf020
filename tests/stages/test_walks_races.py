"""The walk planner against passes, mailboxes and transfers that act in any order: what never is, and that all end."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamflow.stages.decisions import Claim, Decision, Fetch
from streamflow.stages.events import BlockReady
from streamflow.stages.mailbox import Mailbox
from streamflow.stages.walk_sources import ImmediateWalks, SharedWalks, WalkSource
from streamflow.stages.walks import WalkPlanner


class Happened:
    """A device event; the planner never looks at it."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@attrs.frozen
class Script:
    """What a pass does: its visits, and where it fails (None: not at all), counted in entries and exits of blocks."""

    visits: tuple[int, ...]
    fails_at: int | None = None


@attrs.frozen
class Setting:
    """A window, the passes of each place, and the order in which things happen until everyone is let go on."""

    num_blocks: int
    num_slots: int
    scripts: tuple[tuple[Script, ...], ...]
    speeds: tuple[int, ...]
    schedule: tuple[int, ...]
    min_passes: int = 1
    #: The blocks from here on are another component's; None: there is one component.
    split: int | None = None
    #: Passes of a walk at most, some of which may join late; None: all who wait, when it starts.
    max_passes: int | None = None

    @property
    def components(self) -> dict[str, tuple[int, ...]]:
        blocks = tuple(range(self.num_blocks))
        if self.split is None:
            return {"first": blocks}
        return {"first": blocks[: self.split], "second": blocks[self.split :]}

    @property
    def source(self) -> WalkSource:
        return ImmediateWalks(self.min_passes) if self.max_passes is None else SharedWalks(self.max_passes)

    def component_of(self, visits: Sequence[int]) -> str:
        """The component whose blocks are visited."""
        return next(name for name, blocks in self.components.items() if set(visits) <= set(blocks))


# What passes tell the planner
@attrs.frozen
class Join:
    pass_id: int
    component: str


@attrs.frozen
class Want:
    pass_id: int
    block: int
    serial: int


@attrs.frozen
class Left:
    pass_id: int
    block: int
    passed_by: tuple[int, ...]


@attrs.frozen
class End:
    pass_id: int
    completed: bool


Message = Join | Want | Left | End


class OpenMailbox(Mailbox):
    """The real one, which lets a test see what the thread could still take."""

    def messages(self) -> list[BlockReady]:
        return list(self._ready.values())


class ModelPlace:
    """A compute thread that runs its scripts, one step at a time, as `Pass` does."""

    def __init__(
        self, scripts: Sequence[Script], first_pass_id: int, component_of: Callable[[Sequence[int]], str]
    ) -> None:
        self._component_of = component_of
        self.mailbox = OpenMailbox()
        self.outbox: deque[Message] = deque()
        self.inside: BlockReady | None = None
        self.pass_id: int | None = None
        self._scripts = deque(scripts)
        self._next_pass_id = first_pass_id
        self._visits: deque[int] = deque()
        self._countdown: int | None = None
        self._asked = False
        self._passed_by: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.pass_id is None and not self._scripts

    @property
    def can_step(self) -> bool:
        """Whether the thread would do something now: it is not at its end, and not in a wait that must go on."""
        if self.pass_id is None:
            return bool(self._scripts)
        return not self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """Whether the thread asked for a block and was not told of it yet."""
        return self._asked and self._visits[0] not in {ready.block for ready in self.mailbox.messages()}

    def step(self) -> None:
        if self.pass_id is None:
            self._begin()
        elif self._countdown == 0 and not self._asked:
            self._end(completed=False)
        elif self.inside is not None:
            self._leave(self.inside)
        elif self._visits:
            self._enter(self.pass_id, self._visits[0])
        else:
            self._end(completed=True)

    def _begin(self) -> None:
        script = self._scripts.popleft()
        self.pass_id, self._next_pass_id = self._next_pass_id, self._next_pass_id + 1
        self._visits, self._countdown = deque(script.visits), script.fails_at
        self._passed_by = ()
        self.mailbox.begin(self.pass_id)
        self.outbox.append(Join(self.pass_id, self._component_of(script.visits)))

    def _enter(self, pass_id: int, block: int) -> None:
        taken = self.mailbox.take(block)
        if taken is None:
            self.outbox.append(Want(pass_id, block, self.mailbox.ask()))
            self._asked = True
            return
        self.inside, self._passed_by = taken
        self._asked = False
        self._count_down()

    def _leave(self, ready: BlockReady) -> None:
        self.outbox.append(Left(ready.pass_id, ready.block, self._passed_by))
        self.inside, self._passed_by = None, ()
        self._visits.popleft()
        self._count_down()

    def _end(self, *, completed: bool) -> None:
        assert self.pass_id is not None
        self.outbox.append(End(self.pass_id, completed))
        self.pass_id, self.inside = None, None

    def _count_down(self) -> None:
        if self._countdown is not None:
            self._countdown -= 1


@attrs.define
class ModelSlot:
    block: int | None = None
    generation: int = 0
    bound: bool = False


class Race:
    """Places, planner and transfers; `act` lets one of the things happen that could happen next."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.planner = WalkPlanner(setting.components, setting.num_slots, setting.source)
        self.places = [
            ModelPlace(scripts, 1 + 100 * i, setting.component_of) for i, scripts in enumerate(setting.scripts)
        ]
        self.slots = [ModelSlot() for _ in range(setting.num_slots)]
        self.fetching: list[Fetch] = []
        self.joined: set[int] = set()
        self.component_of: dict[int, str] = {}
        self.walk_of: dict[int, int] = {}
        self.ended_passes: set[int] = set()
        self.walk_id: int | None = None
        self.num_acts = 0
        self.waits = [0] * len(self.places)
        self.entered: set[int] = set()
        self._decide()

    # What may happen

    def act(self, choice: int) -> None:
        """Do one of the possible things; faster places come up more often."""
        possible: list[tuple[str, int]] = [("fetched", i) for i in range(len(self.fetching))]
        for index, place in enumerate(self.places):
            if place.can_step:
                possible += [("step", index)] * self.setting.speeds[index]
            if place.outbox:
                possible += [("deliver", index), ("deliver all", index)]
        if possible:
            self._do(*possible[choice % len(possible)])

    def _do(self, what: str, index: int) -> None:
        if what == "step":
            self._step(self.places[index])
        elif what == "fetched":
            self._fetched(self.fetching.pop(index))
        elif what == "deliver":
            self._deliver(self.places[index])
            self._decide()
        else:
            while self.places[index].outbox:
                self._deliver(self.places[index])
            self._decide()

    def go_on(self) -> bool:
        """Let everything happen once; returns whether anything did."""
        before = self.num_acts
        for place in self.places:
            if place.can_step:
                self._step(place)
            while place.outbox:
                self._deliver(place)
        self._decide()
        for fetch in tuple(self.fetching):
            self.fetching.remove(fetch)
            self._fetched(fetch)
        self._count_waits()
        return self.num_acts != before

    def _count_waits(self) -> None:
        for index, place in enumerate(self.places):
            walks = self.walk_id is not None and self.walk_of.get(place.pass_id or 0) == self.walk_id
            self.waits[index] = self.waits[index] + 1 if walks and place.is_waiting else 0

    def finish(self) -> None:
        """Let what is under way come to its end; each pass was in one walk, and nothing is left open."""
        while self.go_on():
            pass
        assert self.walk_id is None
        assert self.entered <= set(self.walk_of)
        assert sorted(set(self.walk_of.values())) == list(range(1, self.planner.num_walks + 1))
        assert not any(self.planner.claims_on(slot) for slot in range(self.setting.num_slots))

    @property
    def num_fetches(self) -> int:
        return sum(slot.generation for slot in self.slots)

    @property
    def is_over(self) -> bool:
        return all(place.is_over and not place.outbox for place in self.places)

    # What each of them does

    def _step(self, place: ModelPlace) -> None:
        self.num_acts += 1
        place.step()
        if place.inside is not None:
            self._check_inside(place.inside)

    def _deliver(self, place: ModelPlace) -> None:
        self.num_acts += 1
        match place.outbox.popleft():
            case Join(pass_id, component):
                self.joined.add(pass_id)
                self.component_of[pass_id] = component
                self.planner.join(pass_id, component, maker=pass_id // 100)
            case Want(pass_id, block, serial):
                self.planner.want(pass_id, block, serial)
            case Left(pass_id, block, passed_by):
                self.planner.left(pass_id, block, passed_by)
            case End(pass_id, completed):
                self.ended_passes.add(pass_id)
                self.planner.end(pass_id, completed=completed)

    def _fetched(self, fetch: Fetch) -> None:
        self.num_acts += 1
        slot = self.slots[fetch.slot]
        assert (slot.block, slot.generation) == (fetch.block, fetch.generation), "refilled while it was being filled"
        slot.bound = True
        self.planner.fetched(fetch.slot, fetch.generation)
        self._decide()

    def _decide(self) -> None:
        decision = self.planner.decide()
        self._note_walks(decision)
        for claim in decision.claims:
            self._tell(claim)
        for fetch in decision.fetches:
            self._refill(fetch)

    def _note_walks(self, decision: Decision) -> None:
        if decision.ended is not None:
            assert decision.ended == self.walk_id
            assert {p for p, walk in self.walk_of.items() if walk == decision.ended} <= self.ended_passes
            self.walk_id = None
        if decision.started is not None:
            assert self.walk_id is None, "two walks at once"
            assert len(decision.started.pass_ids) >= self.setting.min_passes
            self.walk_id = decision.started.walk_id
            self._note_walkers(decision.started.pass_ids)
        self._note_walkers(decision.joined)

    def _note_walkers(self, pass_ids: Sequence[int]) -> None:
        for pass_id in pass_ids:
            assert self.walk_id is not None
            assert pass_id in self.joined - self.ended_passes
            assert pass_id not in self.walk_of, "a pass in two walks"
            self.walk_of[pass_id] = self.walk_id
        walkers = [pass_id for pass_id, walk_id in self.walk_of.items() if walk_id == self.walk_id]
        assert len({self.component_of[pass_id] for pass_id in walkers}) <= 1, "two components in one walk"
        if self.setting.max_passes is not None:
            assert len(walkers) <= self.setting.max_passes

    def _tell(self, claim: Claim) -> None:
        slot = self.slots[claim.slot]
        assert (slot.block, slot.generation, slot.bound) == (claim.block, claim.generation, True)
        assert self.walk_of[claim.pass_id] == self.walk_id, "told before its walk began"
        ready = BlockReady(
            claim.pass_id, claim.block, claim.slot, claim.generation, claim.serial, claim.rank, Happened()
        )
        for place in self.places:
            place.mailbox.post(ready)

    def _refill(self, fetch: Fetch) -> None:
        slot = self.slots[fetch.slot]
        assert slot.block == fetch.drops
        assert slot.bound == (fetch.drops is not None), "a slot was refilled before it was filled"
        assert fetch.generation == slot.generation + 1
        assert all(other.block != fetch.block for other in self.slots), "a block in two slots"
        for place in self.places:
            assert place.inside is None or place.inside.slot != fetch.slot, "refilled under a pass"
            if place.pass_id is not None:
                assert all(ready.slot != fetch.slot for ready in place.mailbox.messages()), "a message went stale"
        self.slots[fetch.slot] = ModelSlot(fetch.block, fetch.generation)
        self.fetching.append(fetch)

    def _check_inside(self, ready: BlockReady) -> None:
        self.entered.add(ready.pass_id)
        slot = self.slots[ready.slot]
        assert (slot.block, slot.generation, slot.bound) == (ready.block, ready.generation, True)
        assert self.planner.slot_of(ready.block) == ready.slot
        assert ready.pass_id in self.planner.claims_on(ready.slot)


def run_to_the_end(setting: Setting) -> Race:
    """Run in the drawn order, then let everyone go on; nobody waits for ever, nor long."""
    race = Race(setting)
    for choice in setting.schedule:
        race.act(choice)
    longest_wait = 6 * (setting.num_slots + 1) * len(race.places)
    while not race.is_over:
        assert race.go_on(), "nobody can go on: a deadlock"
        assert max(race.waits) <= longest_wait, "a pass starves"
    race.finish()
    return race


def visits_of(num_blocks: int, min_size: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """In order, in order with skips, or any blocks in any order, repeats included."""
    full = tuple(range(num_blocks))
    return st.one_of(
        st.just(full),
        st.sets(st.sampled_from(full), min_size=min_size).map(lambda blocks: tuple(sorted(blocks))),
        st.lists(st.sampled_from(full), min_size=min_size, max_size=2 * num_blocks).map(tuple),
    )


@st.composite
def settings_of_races(draw: st.DrawFn, num_places: int, *, whole: bool = False, min_passes: int = 1) -> Setting:
    """``whole``: every pass runs all blocks, in order. With ``min_passes``, every pass enters a block at least."""
    num_blocks = draw(st.integers(1, 9))
    visits = st.just(tuple(range(num_blocks))) if whole else visits_of(num_blocks, min_size=min_passes - 1)
    fails_at = st.none() if whole else st.none() | st.integers(min_passes - 1, 2 * num_blocks)
    num_passes = draw(st.integers(1, 3))
    passes = st.lists(st.builds(Script, visits, fails_at), min_size=num_passes, max_size=num_passes).map(tuple)
    return Setting(
        num_blocks=num_blocks,
        num_slots=draw(st.integers(1, 4)),
        scripts=tuple(draw(passes) for _ in range(num_places)),
        speeds=tuple(draw(st.sampled_from([1, 3, 10])) for _ in range(num_places)),
        schedule=draw(schedules()),
        min_passes=min_passes,
    )


def schedules() -> st.SearchStrategy[tuple[int, ...]]:
    return st.sampled_from([0, 40, 120]).flatmap(lambda size: st.binary(min_size=size, max_size=size)).map(tuple)


@pytest.mark.parametrize("num_places", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_no_slot_changes_under_a_pass_and_every_pass_ends(num_places: int, data: st.DataObject) -> None:
    run_to_the_end(data.draw(settings_of_races(num_places)))


@st.composite
def settings_of_two_components(draw: st.DrawFn, num_places: int) -> Setting:
    """Passes of either component in any order, in walks that some of them join late."""
    num_blocks = draw(st.integers(2, 9))
    split = draw(st.integers(1, num_blocks - 1))
    first = visits_of(split)
    second = visits_of(num_blocks - split).map(lambda visits: tuple(split + block for block in visits))
    script = st.builds(Script, first | second, st.none() | st.integers(0, 2 * num_blocks))
    return Setting(
        num_blocks=num_blocks,
        num_slots=draw(st.integers(1, 4)),
        scripts=tuple(tuple(draw(st.lists(script, min_size=1, max_size=3))) for _ in range(num_places)),
        speeds=tuple(draw(st.sampled_from([1, 3, 10])) for _ in range(num_places)),
        schedule=draw(schedules()),
        split=split,
        max_passes=draw(st.integers(1, num_places)),
    )


@pytest.mark.parametrize("num_places", [2, 4])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_passes_of_two_components_share_the_window_and_all_end(num_places: int, data: st.DataObject) -> None:
    run_to_the_end(data.draw(settings_of_two_components(num_places)))


@given(settings_of_races(2, min_passes=2))
@settings(max_examples=60, deadline=None)
def test_passes_that_start_in_pairs_end_too(setting: Setting) -> None:
    race = run_to_the_end(setting)
    assert race.planner.num_walks == len(setting.scripts[0])


@pytest.mark.parametrize("num_places", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_passes_in_order_at_any_speed_fetch_a_block_at_most_once_a_walk(num_places: int, data: st.DataObject) -> None:
    setting = data.draw(settings_of_races(num_places, whole=True))
    race = run_to_the_end(setting)
    if setting.num_slots >= setting.num_blocks:
        assert race.num_fetches == setting.num_blocks
    else:
        assert race.num_fetches <= setting.num_blocks * race.planner.num_walks + setting.num_slots


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", range(1, 10))
def test_a_pass_ten_times_as_fast_with_skips_harms_no_other(num_blocks: int, num_slots: int) -> None:
    slow = Script(tuple(range(num_blocks)))
    fast = Script(tuple(range(0, num_blocks, 2)))
    backwards = Script(tuple(reversed(range(num_blocks))))
    for seed in range(5):
        randomness = random.Random(seed)
        setting = Setting(
            num_blocks=num_blocks,
            num_slots=num_slots,
            scripts=((slow, slow), (fast, backwards)),
            speeds=(1, 10),
            schedule=tuple(randomness.randrange(60) for _ in range(200)),
        )
        run_to_the_end(setting)
