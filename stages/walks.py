"""The walk planner: which passes walk together, what to fetch into which slot, what to drop. Pure: no torch, no clock.

A pass is one forward call of a component; a walk is over one component's blocks and serves every pass that joined it.
Several components share the window; one walk is under way at a time. The planner lives on the event loop and is told
what the passes did (`join`, `want`, `left`, `end`, `gone`) and what the transfers did (`fetched`); `decide` then says
what to do. Its promises, held by property tests:

- a block is in at most one slot at a time;
- a slot is given to another block only when no pass may still be inside the old one: a pass that was told of a block
  holds a claim on its slot until it says itself that it left the block, passed it by, or wants another one, or ends;
- a pass that waits for a block gets it, whatever the others do, as long as they keep leaving the blocks they entered;
- the order of blocks is a forecast. A wrong one costs time, never exactness.

While a wave of many ranks is under way (see `Feed`) nothing is forecast: the feed says what is fetched next, and a pass
that would need anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from streamflow.stages.decisions import Claim, Decision, Fetch, Refusal, Walk
from streamflow.stages.feed import Feed
from streamflow.stages.order import BlockOrder
from streamflow.stages.ranks.errors import OutOfTurnError
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.returns import Returns
from streamflow.stages.slot_table import Slot, SlotTable
from streamflow.stages.walk_sources import ImmediateWalks, StandingPass, WaitingPass, WalkChoice, WalkSource


@attrs.define
class _Pass:
    component: str
    maker: int | None
    since: float
    alone: bool
    request_id: str | None
    wave: WaveSignature | None
    position: int = 0
    visited: list[int] = attrs.field(factory=list)
    wanted: int | None = None
    want_rank: int = 0
    surprising: bool = False
    serial: int = 0


class WalkPlanner:
    """Decides for one window of ``num_slots`` slots over ``orders``: for each component, by name, its streamed blocks
    in expected execution order.

    Blocks are any integers; no two components have one in common. Times are seconds of any one clock, which is the
    caller's. One owner, one thread.

    :raises ValueError: if there are blocks and no slot, or if a block is in two components.
    """

    def __init__(self, orders: Mapping[str, Sequence[int]], num_slots: int, source: WalkSource | None = None) -> None:
        self._orders = {component: BlockOrder(order) for component, order in orders.items()}
        self._blocks = {component: frozenset(order) for component, order in orders.items()}
        _check_blocks(self._blocks.values(), num_slots)
        self._slots = SlotTable(num_slots)
        self._source: WalkSource = source if source is not None else ImmediateWalks()
        self._waiting: dict[int, _Pass] = {}
        self._walking: dict[int, _Pass] = {}
        self._returns = Returns()
        self._walk: Walk | None = None
        self._visits: range | None = None
        self._component = next(iter(orders), "")
        self._num_walks = 0
        self._num_wants = 0
        self._num_joined = 0

    def order_of(self, component: str) -> tuple[int, ...]:
        """The visits that the next pass of ``component`` is expected to make.

        :raises KeyError: if there is no such component.
        """
        return self._orders[component].visits

    @property
    def num_walks(self) -> int:
        """Walks started so far."""
        return self._num_walks

    def slot_of(self, block: int) -> int | None:
        """The slot that holds ``block`` or is being filled with it; None if there is none."""
        return self._slots.slot_of(block)

    def claims_on(self, slot: int) -> frozenset[int]:
        """The passes that may be inside the block in ``slot``."""
        return frozenset(self._slots[slot].claims)

    def standing_passes(self) -> list[StandingPass]:
        """The passes whose own code the wave under way waits for: in its walk, or in one of this rank alone, which has
        the window until it ends. None where there is no wave.
        """
        feed = self._source.feed
        if feed is None or not feed.is_on:
            return []
        if self._visits is None:
            walking = self._walking.items()
            return [self._standing_alone(state) for pass_id, state in walking if self._has_wanted(pass_id, state)]
        found: list[StandingPass] = []
        for state in self._walking.values():
            visit = self._visits.start + state.position
            if visit >= self._visits.stop:
                found.append(StandingPass(state.request_id, None))
            elif visit < feed.num_there:
                found.append(StandingPass(state.request_id, feed.block_of(visit)))
        return found

    def _has_wanted(self, pass_id: int, state: _Pass) -> bool:
        """Whether the pass has asked for nothing that it was not told of."""
        if state.wanted is None:
            return True
        index = self.slot_of(state.wanted)
        return index is not None and pass_id in self._slots[index].claims

    def _standing_alone(self, state: _Pass) -> StandingPass:
        visits = self._orders[state.component].visits
        return StandingPass(state.request_id, visits[state.position] if state.position < len(visits) else None)

    # What the passes did

    def join(
        self,
        pass_id: int,
        component: str,
        *,
        maker: int | None = None,
        alone: bool = False,
        now: float = 0.0,
        request_id: str | None = None,
        wave: WaveSignature | None = None,
    ) -> None:
        """A pass begins and waits for a walk; see `WaitingPass`.

        :raises KeyError: if there is no such component.
        """
        if component not in self._orders:
            raise KeyError(component)
        self._waiting[pass_id] = _Pass(component, maker, now, alone, request_id, wave)
        if maker is not None:
            self._returns.began(maker, component, now)

    def want(self, pass_id: int, block: int, serial: int) -> Refusal | None:
        """The pass stands before ``block`` and takes nothing but an answer to ``serial``: its claims are void.

        Returns why it gets none: in a wave, a block that would have to be fetched again.

        :raises KeyError: if ``block`` is not streamed, or not in the pass's component.
        """
        state = self._state(pass_id)
        if state is None:
            return None
        if block not in self._blocks[state.component]:
            raise KeyError(block)
        self._slots.give_back_all(pass_id)
        if self._is_out_of_turn(pass_id, block):
            return Refusal(pass_id, OutOfTurnError(state.component, block, state.request_id))
        order = self._orders[state.component]
        self._num_wants += 1
        state.wanted, state.serial, state.want_rank = block, serial, self._num_wants
        state.surprising = block not in order.ahead(state.position, len(self._slots))
        state.position = order.position_before(block, state.position)
        return None

    def _is_out_of_turn(self, pass_id: int, block: int) -> bool:
        """Whether the pass walks in a wave, and its walk has had ``block`` already and does not hold it any more."""
        feed = self._source.feed
        if feed is None or self._visits is None or pass_id not in self._walking:
            return False
        visit = next(visit for visit in self._visits if feed.block_of(visit) == block)
        return visit < feed.next_visit and not any(slot.visit == visit for slot in self._slots)

    def left(self, pass_id: int, block: int, passed_by: Iterable[int] = ()) -> None:
        """The pass has issued all of the block's work, and will not take its claims on the blocks ``passed_by``."""
        state = self._state(pass_id)
        if state is None:
            return
        state.visited.append(block)
        state.wanted = None
        state.position = self._orders[state.component].position_after(block, state.position)
        self._slots.give_back(pass_id, (block, *passed_by))

    def end(self, pass_id: int, *, completed: bool, now: float = 0.0) -> None:
        """The pass is over. ``completed``: it ran to its end, so its visits are worth learning from."""
        state = self._state(pass_id)
        if state is None:
            return
        self._slots.give_back_all(pass_id)
        self._waiting.pop(pass_id, None)
        self._walking.pop(pass_id, None)
        if state.maker is not None:
            self._returns.ended(state.maker, now)
            if not completed and state.request_id is None:
                # a thread that is no request says nowhere that it has ended: what tore this pass may have ended it
                self.gone(state.maker)
        if completed and not self._is_collective(state.component):
            self._orders[state.component].learn(state.visited)

    def gone(self, maker: int) -> None:
        """``maker`` makes no more passes: no walk has to wait for it."""
        self._returns.gone(maker)
        self._source.gone(maker)

    # What the transfers did

    def fetched(self, slot: int, generation: int) -> bool:
        """The copy into ``slot`` is issued: passes may be told of its block.

        Returns whether `arrived` is to be told when it has happened: no pass of this rank sets the feed's pace.
        """
        filled = self._slots[slot]
        if filled.generation != generation:
            return False
        filled.ready = True
        is_unpaced = self._visits is not None and not self._walking
        if filled.visit is not None and not is_unpaced:
            self._there(filled.visit)
        return filled.visit is not None and is_unpaced

    def arrived(self, slot: int, generation: int) -> None:
        """The copy into ``slot`` has happened."""
        visit = self._slots[slot].visit
        if self._slots[slot].generation == generation and visit is not None:
            self._there(visit)

    def _there(self, visit: int) -> None:
        if self._source.feed is not None:
            self._source.feed.there(visit)

    # The decision

    def decide(self, now: float = 0.0) -> Decision:
        """What is to be done after all that was told; doing it is assumed from here on."""
        ended = self._end_walk(now)
        started, choice = self._start_walk(now)
        joined = self._join_walk()
        # A slow pass that reaches a block as foreseen keeps it, however long a fast one has waited for the slot: it
        # would have to be fetched again. One that stands before a block unforeseen comes after those who waited.
        foreseen = [pass_id for pass_id, state in self._walking.items() if state.wanted is None or not state.surprising]
        claims = tuple(self._claims(foreseen))
        fetches = tuple(self._fetches() if not self._feeds() else self._feed_fetches())
        claims = (*claims, *self._claims(self._walking))
        again_at = now if self._is_over() else choice.again_at
        return Decision(ended, started, joined, fetches, claims, again_at, choice.refused)

    def _is_over(self) -> bool:
        """Whether the walk has ended: no pass of it is left, and this rank has fed the others what they need of it."""
        if self._walk is None or self._walking:
            return False
        feed = self._source.feed
        return feed is None or self._visits is None or feed.num_there >= self._visits.stop

    def _end_walk(self, now: float) -> int | None:
        walk = self._walk
        if walk is None or not self._is_over():
            return None
        if self._source.feed is not None and self._visits is not None:
            self._source.feed.end_walk()
        self._walk = self._visits = None
        self._source.walk_ended(walk.component)
        self._returns.walked(walk.component, now - walk.started_at)
        return walk.walk_id

    def _start_walk(self, now: float) -> tuple[Walk | None, WalkChoice]:
        if self._walk is not None:
            return None, WalkChoice()
        choice = self._source.next_walk(self._waiting_passes(), self._returns, now)
        for refusal in choice.refused:
            self._waiting.pop(refusal.pass_id, None)
        component = choice.component
        if choice.pass_ids:
            component = self._waiting[choice.pass_ids[0]].component
        if component is None:
            return None, choice
        self._num_joined = 0
        self._join(choice.pass_ids)
        self._num_walks += 1
        self._walk = Walk(self._num_walks, component, choice.pass_ids, now)
        self._component = component
        if self._source.feed is not None and self._is_collective(component):
            self._visits = self._source.feed.start_walk()
        return self._walk, choice

    def _join_walk(self) -> tuple[int, ...]:
        """Let passes join the walk where that costs no fetch: nobody who walks has left a block that is gone."""
        if self._walk is None or not self._waiting or self._visits is not None:
            return ()
        if len(self._walking) < self._num_joined:
            return ()
        visited = {block for state in self._walking.values() for block in state.visited}
        if not visited <= {slot.block for slot in self._slots}:
            return ()
        late = self._source.late_joins(self._waiting_passes(), self._walk.component, len(self._walking))
        self._join(late)
        return late

    def _join(self, pass_ids: Iterable[int]) -> None:
        for pass_id in pass_ids:
            self._walking[pass_id] = self._waiting.pop(pass_id)
            self._num_joined += 1

    def _waiting_passes(self) -> list[WaitingPass]:
        return [
            WaitingPass(pass_id, p.component, p.since, p.alone, p.maker, p.request_id, p.wave)
            for pass_id, p in self._waiting.items()
        ]

    # Fetches of a wave

    def _is_collective(self, component: str) -> bool:
        return self._source.feed is not None and component in self._source.feed.components

    def _feeds(self) -> bool:
        """Whether the feed decides what is fetched: a wave is under way, and no walk of this rank alone."""
        feed = self._source.feed
        return feed is not None and feed.is_on and (self._walk is None or self._visits is not None)

    def _feed_fetches(self) -> Iterator[Fetch]:
        feed = self._source.feed
        if feed is None:
            return
        floor = self._floor(feed)
        for visit in feed.due(floor, len(self._slots)):
            block = feed.block_of(visit)
            index = self._slots.free_for_visit(block, floor)
            if index is None:
                return
            feed.fetching(visit)
            yield self._slots.fill(index, block, visit=visit)

    def _floor(self, feed: Feed) -> int:
        """The first visit that may still be needed here: by a pass, or because it is not there yet."""
        if self._visits is None:
            return feed.following.start
        positions = [self._visits.start + p.position for p in self._walking.values()]
        return min([*positions, feed.num_there])

    # Fetches of this rank alone

    def _fetches(self) -> Iterator[Fetch]:
        desired = self._desired()
        surprising = {p.wanted for p in self._walking.values() if p.surprising}
        for block in desired:
            if self.slot_of(block) is not None:
                continue
            index = self._slots.free_for(desired)
            if index is None:
                return  # nothing less urgent may take the slot that this one waits for
            yield self._slots.fill(index, block, on_demand=block in surprising)

    def _desired(self) -> list[int]:
        """The blocks that the window should hold, most urgent first."""
        wanted = sorted((p.want_rank, p.wanted) for p in self._walking.values() if p.wanted is not None)
        chosen = dict.fromkeys(block for _, block in wanted)
        for block in self._foreseen():
            chosen.setdefault(block)
        return list(chosen)[: len(self._slots)]

    def _foreseen(self) -> list[int]:
        """The blocks that are needed next, if all goes as expected: of this walk, and then of the next."""
        oldest = next(iter(self._waiting.values()), None)
        component = self._component if oldest is None else oldest.component
        # what a wave needs is no forecast: the feed brings it
        is_forecast = component in self._orders and not self._is_collective(component)
        following = self._orders[component].visits if is_forecast else ()
        if not self._walking:
            return list(dict.fromkeys(following))[: len(self._slots)]
        slowest = min(p.position for p in self._walking.values())
        return self._orders[self._component].ahead(slowest, len(self._slots), following)

    def _claims(self, pass_ids: Iterable[int]) -> Iterator[Claim]:
        for pass_id in pass_ids:
            state = self._walking[pass_id]
            # what it stands before comes first: until it is told of that, a claim on anything else would be held by
            # a pass that waits, and two such passes could wait for each other's slots
            for index in sorted(range(len(self._slots)), key=lambda i: self._slots[i].block != state.wanted):
                slot = self._slots[index]
                if slot.block is None or not slot.ready or pass_id in slot.claims or not self._is_of_walk(slot):
                    continue
                if slot.block == state.wanted or self._may_run_ahead(pass_id, state, slot.block):
                    slot.claims.add(pass_id)
                    rank = self._orders[state.component].position_before(slot.block, state.position)
                    yield Claim(pass_id, slot.block, index, slot.generation, state.serial, rank)

    def _is_of_walk(self, slot: Slot) -> bool:
        """Whether what is in ``slot`` is for the walk under way; a wave's walk has every block fetched for itself."""
        return self._visits is None or (slot.visit is not None and slot.visit in self._visits)

    def _may_run_ahead(self, pass_id: int, state: _Pass, block: int) -> bool:
        """Whether the pass may be told of ``block``, which it has not asked for: it is near, and nothing is due."""
        if not self._has_wanted(pass_id, state):
            return False
        order = self._orders[state.component]
        is_near = block in order.ahead(state.position, len(self._slots))
        return is_near and order.comes_after(block, state.position)

    def _state(self, pass_id: int) -> _Pass | None:
        return self._walking.get(pass_id) or self._waiting.get(pass_id)


def _check_blocks(components: Iterable[frozenset[int]], num_slots: int) -> None:
    blocks = [block for component in components for block in component]
    if blocks and num_slots < 1:
        raise ValueError(f"{len(set(blocks))} blocks are to be streamed but the window has {num_slots} slots")
    if len(set(blocks)) < len(blocks):
        raise ValueError(f"blocks {sorted({b for b in blocks if blocks.count(b) > 1})} are in more than one component")
