"""This rank's part in what all ranks agree on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import anyio

from streamflow.stages.ranks.errors import RanksDisagreeError
from streamflow.stages.ranks.messages import Proposal


class _Agreement:
    """A proposal of this rank, and what came of it: those of all ranks. None: their work together ended before."""

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.agreed: tuple[Proposal, ...] | None = None
        self.settled = anyio.Event()

    def settle(self, agreed: tuple[Proposal, ...] | None) -> None:
        self.agreed = agreed
        self.settled.set()


class Agreements:
    """One after the other, in the order in which they are asked for. On the loop."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._serials = itertools.count()
        self._wanted: _Agreement | None = None
        self._proposed: _Agreement | None = None
        self._ended = False

    def propose(self) -> Proposal | None:
        """What this rank proposes in a round, if anything."""
        self._proposed = self._wanted
        return None if self._proposed is None else self._proposed.proposal

    def settle(self, agreed: tuple[Proposal, ...]) -> None:
        """All ranks proposed something in that round. Who asked for another agreement since waits on."""
        if self._proposed is not None:
            self._proposed.settle(agreed)

    def end(self) -> None:
        """There are no rounds any more."""
        self._ended = True
        if self._wanted is not None:
            self._wanted.settle(None)

    async def agree(self, name: str, value: object, tell: Callable[[], None]) -> list[Any] | None:
        """The values of all ranks, by rank. None: there are no rounds any more. ``tell`` is called for a round soon.

        :raises RanksDisagreeError: if a rank proposes something of another name.
        :raises TypeError: if ``value`` is none for JSON.
        """
        wanted = _Agreement(Proposal(next(self._serials), name, json.loads(json.dumps(value))))
        async with self._turn:
            if not self._ended:
                self._wanted = wanted
                tell()
                try:
                    await wanted.settled.wait()
                finally:
                    self._wanted = None
        return None if wanted.agreed is None else _values(name, wanted.agreed)


def _values(name: str, agreed: tuple[Proposal, ...]) -> list[Any]:
    names = [proposal.name for proposal in agreed]
    if set(names) != {name}:
        raise RanksDisagreeError("what they agree on next", names)
    return [proposal.value for proposal in agreed]
