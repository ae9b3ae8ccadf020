"""What the walk planner knows of the window: which block each slot holds, and who may be inside it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import attrs

from streamflow.stages.decisions import Fetch


@attrs.define
class Slot:
    """One slot. ``ready``: passes may be told of its block. ``claims``: those that may be inside it.

    ``visit``: what it was fetched for in a wave, see `Feed`; None: it was not.
    """

    block: int | None = None
    generation: int = 0
    ready: bool = False
    visit: int | None = None
    claims: set[int] = attrs.field(factory=set)


class SlotTable:
    """``num_slots`` slots. A block is in at most one of them."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [Slot() for _ in range(num_slots)]

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def slot_of(self, block: int | None) -> int | None:
        """The slot that holds ``block`` or is being filled with it; None if there is none."""
        return next((i for i, slot in enumerate(self._slots) if slot.block == block), None)

    def give_back(self, pass_id: int, blocks: Iterable[int]) -> None:
        """The pass is not inside ``blocks`` and will not be."""
        for block in blocks:
            index = self.slot_of(block)
            if index is not None:
                self._slots[index].claims.discard(pass_id)

    def give_back_all(self, pass_id: int) -> None:
        """The pass is inside nothing and was told of nothing that it will take."""
        for slot in self._slots:
            slot.claims.discard(pass_id)

    def free_for(self, desired: Collection[int]) -> int | None:
        """A slot that another block may have, where ``desired`` are those to keep; None if there is none."""
        return self._first_free(lambda slot: slot.block not in desired)

    def free_for_visit(self, block: int, floor: int) -> int | None:
        """A slot that ``block`` may have in a wave that still needs all visits from ``floor`` on; None: none yet."""
        holder = self.slot_of(block)
        if holder is not None:  # of an earlier walk
            return holder if _is_free(self._slots[holder]) and _is_past(self._slots[holder], floor) else None
        return self._first_free(lambda slot: _is_past(slot, floor))

    def _first_free(self, may_go: Callable[[Slot], bool]) -> int | None:
        empty = (index for index, slot in enumerate(self._slots) if slot.block is None)
        others = (index for index, slot in enumerate(self._slots) if _is_free(slot) and may_go(slot))
        return next(empty, next(others, None))

    def fill(self, index: int, block: int, *, on_demand: bool = False, visit: int | None = None) -> Fetch:
        """``block`` comes into the slot now; what was there is dropped."""
        slot = self._slots[index]
        fetch = Fetch(block, index, slot.generation + 1, slot.block, on_demand)
        slot.block, slot.generation, slot.ready, slot.visit = block, fetch.generation, False, visit
        return fetch


def _is_free(slot: Slot) -> bool:
    return slot.ready and not slot.claims


def _is_past(slot: Slot, floor: int) -> bool:
    return slot.visit is None or slot.visit < floor
