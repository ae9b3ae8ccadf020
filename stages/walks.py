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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from streamflow.stages.order import BlockOrder
from streamflow.stages.returns import Returns
from streamflow.stages.walk_sources import ImmediateWalks, WaitingPass, WalkSource


@attrs.frozen
class Fetch:
    """Bring ``block`` into ``slot``; the block that was there (None: none) is dropped first.

    ``on_demand``: a pass stands before the block and the forecast had not foreseen it.
    """

    block: int
    slot: int
    generation: int
    drops: int | None
    on_demand: bool


@attrs.frozen
class Claim:
    """Tell ``pass_id`` that it may enter ``block`` in ``slot``.

    ``serial`` is that of the pass's last `want`. ``rank`` orders the claims of one pass: once it took one, those of
    lower rank are passed by, and it gives them back with its next `left`.
    """

    pass_id: int
    block: int
    slot: int
    generation: int
    serial: int
    rank: int


@attrs.frozen
class Walk:
    """A walk over ``component`` that started at ``started_at``, with the passes that go together."""

    walk_id: int
    component: str
    pass_ids: tuple[int, ...]
    started_at: float


@attrs.frozen
class Decision:
    """What to do now, in this order. ``joined``: passes that join the walk under way, because it is at its beginning.

    ``again_at``: when to decide again if nothing happens before; None: not at all.
    """

    ended: int | None
    started: Walk | None
    joined: tuple[int, ...]
    fetches: tuple[Fetch, ...]
    claims: tuple[Claim, ...]
    again_at: float | None


@attrs.define
class _Slot:
    block: int | None = None
    generation: int = 0
    ready: bool = False
    claims: set[int] = attrs.field(factory=set)


@attrs.define
class _Pass:
    component: str
    maker: int | None
    since: float
    alone: bool
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
        self._slots = [_Slot() for _ in range(num_slots)]
        self._source: WalkSource = source if source is not None else ImmediateWalks()
        self._waiting: dict[int, _Pass] = {}
        self._walking: dict[int, _Pass] = {}
        self._returns = Returns()
        self._walk: Walk | None = None
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
        return next((i for i, slot in enumerate(self._slots) if slot.block == block), None)

    def claims_on(self, slot: int) -> frozenset[int]:
        """The passes that may be inside the block in ``slot``."""
        return frozenset(self._slots[slot].claims)

    # What the passes did

    def join(
        self, pass_id: int, component: str, *, maker: int | None = None, alone: bool = False, now: float = 0.0
    ) -> None:
        """A pass begins and waits for a walk. ``maker``: what it has in common with the request's other passes;
        ``alone``: see `WaitingPass`.

        :raises KeyError: if there is no such component.
        """
        if component not in self._orders:
            raise KeyError(component)
        self._waiting[pass_id] = _Pass(component, maker, now, alone)
        if maker is not None:
            self._returns.began(maker, component, now)

    def want(self, pass_id: int, block: int, serial: int) -> None:
        """The pass stands before ``block`` and takes nothing but an answer to ``serial``: its claims are void.

        :raises KeyError: if ``block`` is not streamed, or not in the pass's component.
        """
        state = self._state(pass_id)
        if state is None:
            return
        if block not in self._blocks[state.component]:
            raise KeyError(block)
        order = self._orders[state.component]
        self._release_all(pass_id)
        self._num_wants += 1
        state.wanted, state.serial, state.want_rank = block, serial, self._num_wants
        state.surprising = block not in order.ahead(state.position, len(self._slots))
        state.position = order.position_before(block, state.position)

    def left(self, pass_id: int, block: int, passed_by: Iterable[int] = ()) -> None:
        """The pass has issued all of the block's work, and will not take its claims on the blocks ``passed_by``."""
        state = self._state(pass_id)
        if state is None:
            return
        state.visited.append(block)
        state.wanted = None
        state.position = self._orders[state.component].position_after(block, state.position)
        for given_back in (block, *passed_by):
            index = self.slot_of(given_back)
            if index is not None:
                self._slots[index].claims.discard(pass_id)

    def end(self, pass_id: int, *, completed: bool, now: float = 0.0) -> None:
        """The pass is over. ``completed``: it ran to its end, so its visits are worth learning from."""
        state = self._state(pass_id)
        if state is None:
            return
        self._release_all(pass_id)
        self._waiting.pop(pass_id, None)
        self._walking.pop(pass_id, None)
        if state.maker is not None:
            self._returns.ended(state.maker, now)
        if completed:
            self._orders[state.component].learn(state.visited)

    def gone(self, maker: int) -> None:
        """``maker`` makes no more passes: no walk has to wait for it."""
        self._returns.gone(maker)

    # What the transfers did

    def fetched(self, slot: int, generation: int) -> None:
        """The copy into ``slot`` is issued: passes may be told of its block."""
        if self._slots[slot].generation == generation:
            self._slots[slot].ready = True

    # The decision

    def decide(self, now: float = 0.0) -> Decision:
        """What is to be done after all that was told; doing it is assumed from here on."""
        ended = self._end_walk(now)
        started, again_at = self._start_walk(now)
        joined = self._join_walk()
        # A slow pass that reaches a block as foreseen keeps it, however long a fast one has waited for the slot: it
        # would have to be fetched again. One that stands before a block unforeseen comes after those who waited.
        foreseen = [pass_id for pass_id, state in self._walking.items() if state.wanted is None or not state.surprising]
        claims = tuple(self._claims(foreseen))
        fetches = tuple(self._fetches())
        return Decision(ended, started, joined, fetches, (*claims, *self._claims(self._walking)), again_at)

    def _end_walk(self, now: float) -> int | None:
        walk = self._walk
        if walk is None or self._walking:
            return None
        self._walk = None
        self._returns.walked(walk.component, now - walk.started_at)
        return walk.walk_id

    def _start_walk(self, now: float) -> tuple[Walk | None, float | None]:
        if self._walk is not None or not self._waiting:
            return None, None
        choice = self._source.next_walk(self._waiting_passes(), self._returns, now)
        if not choice.pass_ids:
            return None, choice.again_at
        self._num_joined = 0
        self._join(choice.pass_ids)
        self._num_walks += 1
        component = self._walking[choice.pass_ids[0]].component
        self._walk = Walk(self._num_walks, component, choice.pass_ids, now)
        self._component = component
        return self._walk, None

    def _join_walk(self) -> tuple[int, ...]:
        """Let passes join the walk where that costs no fetch: nobody who walks has left a block that is gone."""
        if self._walk is None or not self._waiting or len(self._walking) < self._num_joined:
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
            WaitingPass(pass_id, state.component, state.since, state.alone) for pass_id, state in self._waiting.items()
        ]

    def _fetches(self) -> Iterator[Fetch]:
        desired = self._desired()
        surprising = {p.wanted for p in self._walking.values() if p.surprising}
        for block in desired:
            if self.slot_of(block) is not None:
                continue
            index = self._free_slot(desired)
            if index is None:
                return  # nothing less urgent may take the slot that this one waits for
            slot = self._slots[index]
            fetch = Fetch(block, index, slot.generation + 1, slot.block, block in surprising)
            slot.block, slot.generation, slot.ready = block, fetch.generation, False
            yield fetch

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
        following = self._orders.get(self._component if oldest is None else oldest.component)
        if following is None:
            return []
        if not self._walking:
            return following.ahead(0, len(self._slots))
        slowest = min(p.position for p in self._walking.values())
        return self._orders[self._component].ahead(slowest, len(self._slots), following.visits)

    def _free_slot(self, desired: Sequence[int]) -> int | None:
        for index, slot in enumerate(self._slots):
            if slot.block is None:
                return index
        for index, slot in enumerate(self._slots):
            if slot.ready and not slot.claims and slot.block not in desired:
                return index
        return None

    def _claims(self, pass_ids: Iterable[int]) -> Iterator[Claim]:
        for pass_id in pass_ids:
            state = self._walking[pass_id]
            # what it stands before comes first: until it is told of that, a claim on anything else would be held by
            # a pass that waits, and two such passes could wait for each other's slots
            for index in sorted(range(len(self._slots)), key=lambda i: self._slots[i].block != state.wanted):
                slot = self._slots[index]
                if slot.block is None or not slot.ready or pass_id in slot.claims:
                    continue
                if slot.block == state.wanted or self._may_run_ahead(pass_id, state, slot.block):
                    slot.claims.add(pass_id)
                    rank = self._orders[state.component].position_before(slot.block, state.position)
                    yield Claim(pass_id, slot.block, index, slot.generation, state.serial, rank)

    def _may_run_ahead(self, pass_id: int, state: _Pass, block: int) -> bool:
        """Whether the pass may be told of ``block``, which it has not asked for: it is near, and nothing is due."""
        if state.wanted is not None:
            index = self.slot_of(state.wanted)
            if index is None or pass_id not in self._slots[index].claims:
                return False
        order = self._orders[state.component]
        is_near = block in order.ahead(state.position, len(self._slots))
        return is_near and order.comes_after(block, state.position)

    def _state(self, pass_id: int) -> _Pass | None:
        return self._walking.get(pass_id) or self._waiting.get(pass_id)

    def _release_all(self, pass_id: int) -> None:
        for slot in self._slots:
            slot.claims.discard(pass_id)


def _check_blocks(components: Iterable[frozenset[int]], num_slots: int) -> None:
    blocks = [block for component in components for block in component]
    if blocks and num_slots < 1:
        raise ValueError(f"{len(set(blocks))} blocks are to be streamed but the window has {num_slots} slots")
    if len(set(blocks)) < len(blocks):
        raise ValueError(f"blocks {sorted({b for b in blocks if blocks.count(b) > 1})} are in more than one component")
