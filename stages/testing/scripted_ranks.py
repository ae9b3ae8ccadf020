"""Communicators of several ranks in one process: they exchange real bytes, and do what a test wants of them.

On a device with threads a gather blocks until all ranks have come to it, as under gloo. On sim devices that share one
machine it makes its stream wait, so that the seed decides when each rank comes and goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import attrs
import torch

from streamflow.stages.ranks.errors import GatherError
from streamflow.stages.testing.queues import Machine, NotYet

#: How long a gather blocks for ranks that do not come.
PATIENCE_S = 30.0


class UnlikeGathersError(GatherError):
    """Ranks came to one gather with slices of unlike sizes: ``sizes``, by rank. One of them is out of order."""

    def __init__(self, rank: int, size: int, index: int, sizes: Mapping[int, int]) -> None:
        self.index, self.sizes = index, dict(sizes)
        super().__init__(rank, size, f"gather {index} has slices of {self.sizes} bytes, by rank")


@attrs.define(eq=False)
class _Meeting:
    """One gather: the slices of the ranks that have come to it."""

    slices: dict[int, torch.Tensor] = attrs.field(factory=dict)

    @property
    def sizes(self) -> dict[int, int]:
        return {rank: own.numel() for rank, own in self.slices.items()}


class ScriptedRanks:
    """``size`` ranks, whose ``communicators`` are by rank.

    ``machine``: of the ranks' sim devices; None: their communication streams are threads, where a gather blocks, for at
    most ``timeout_s``.
    """

    def __init__(self, size: int, *, machine: Machine | None = None, timeout_s: float = PATIENCE_S) -> None:
        self.communicators = tuple(ScriptedCommunicator(rank, size, self) for rank in range(size))
        self._machine = machine
        self._timeout_s = timeout_s
        self._changed = threading.Condition(threading.RLock())
        self._meetings: list[_Meeting] = []
        self._held: set[int] = set()
        self._gone: dict[int, str] = {}
        self._failures: dict[tuple[int, int], Exception] = {}

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.communicators)

    def num_gathers(self, rank: int) -> int:
        """Gathers that ``rank`` has come to."""
        return sum(rank in meeting.slices for meeting in self._meetings)

    def hold(self, rank: int) -> None:
        """Keep ``rank`` from coming to its next gather, until `release`."""
        self._change(lambda: self._held.add(rank))

    def release(self, rank: int) -> None:
        """Let it come."""
        self._change(lambda: self._held.discard(rank))

    def fail(self, rank: int, index: int, failure: Exception | None = None) -> None:
        """Let gather ``index`` (from 0 on) of ``rank`` fail with ``failure`` (None: a `GatherError`) before it begins.

        For the others the rank is gone then.
        """
        error = GatherError(rank, self.size, "the test wants it so") if failure is None else failure
        self._change(lambda: self._failures.__setitem__((rank, index), error))

    def leave(self, rank: int, reason: str = "it left") -> None:
        """``rank`` is gone: what it has not come to fails for the others, and for itself."""
        self._change(lambda: self._gone.setdefault(rank, reason))

    def _change(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
        if self._machine is not None:
            self._machine.look_again()

    def wait_until(self, is_ready: Callable[[], bool]) -> bool:
        """Wait, as this kind of device does, until ``is_ready``; False if that took too long."""
        if self._machine is not None:
            if is_ready():
                return True
            raise NotYet(is_ready)
        with self._changed:
            return self._changed.wait_for(is_ready, self._timeout_s)

    def may_come(self, rank: int) -> bool:
        """Whether nothing keeps ``rank`` from its next gather."""
        return rank not in self._held or rank in self._gone

    def come(self, rank: int, index: int, own: torch.Tensor) -> None:
        """``rank`` brings its slice to gather ``index``.

        :raises GatherError: if it fails there, or left before.
        """
        failure = self._failures.get((rank, index))
        if failure is not None:
            self.leave(rank, f"{type(failure).__name__}: {failure}")
            raise failure
        if rank in self._gone:
            raise GatherError(rank, self.size, self._gone[rank])
        with self._changed:
            while len(self._meetings) <= index:
                self._meetings.append(_Meeting())
        self._change(lambda: self._meetings[index].slices.__setitem__(rank, own.clone()))

    def is_settled(self, rank: int, index: int) -> bool:
        """Whether all ranks have come to gather ``index``, or ``rank`` need not wait for them any more."""
        meeting = self._meetings[index]
        return len(meeting.slices) == self.size or any(r == rank or r not in meeting.slices for r in self._gone)

    def slices_of(self, rank: int, index: int) -> Mapping[int, torch.Tensor]:
        """What all ranks brought to gather ``index``, for ``rank``.

        :raises GatherError: if a rank did not come, or the slices are of unlike sizes.
        """
        meeting = self._meetings[index]
        missing = sorted(set(range(self.size)) - set(meeting.slices))
        if missing and rank in self._gone:
            raise GatherError(rank, self.size, self._gone[rank])
        if missing:
            reasons = [f"rank {other}: {self._gone.get(other, 'it did not come in time')}" for other in missing]
            raise GatherError(rank, self.size, "; ".join(reasons))
        if len(set(meeting.sizes.values())) > 1:
            raise UnlikeGathersError(rank, self.size, index, meeting.sizes)
        return meeting.slices


class ScriptedCommunicator:
    """One rank of `ScriptedRanks`. Aborting it is leaving: the others' gathers fail."""

    def __init__(self, rank: int, size: int, ranks: ScriptedRanks) -> None:
        self.rank, self.size = rank, size
        self.is_closed = False
        self._ranks = ranks
        self._num_done = 0
        self._has_come = False

    def gather(self, target: torch.Tensor, slice_bytes: int) -> None:
        index = self._num_done
        if not self._has_come:  # on a sim device it is called again and again
            self._ranks.wait_until(lambda: self._ranks.may_come(self.rank))
            self._ranks.come(self.rank, index, target[self.rank * slice_bytes : (self.rank + 1) * slice_bytes])
            self._has_come = True
        self._ranks.wait_until(lambda: self._ranks.is_settled(self.rank, index))
        for rank, brought in self._ranks.slices_of(self.rank, index).items():
            if rank != self.rank:
                target[rank * slice_bytes : (rank + 1) * slice_bytes].copy_(brought)
        self._num_done, self._has_come = index + 1, False

    def abort(self) -> None:
        self._ranks.leave(self.rank, "it was given up there")

    def close(self) -> None:
        self.is_closed = True
