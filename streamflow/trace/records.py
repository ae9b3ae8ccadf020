"""What a trace keeps: plain tuples, cheap to make. Times are of `time.perf_counter`, in seconds.

Records hold numbers and marks, never tensors, events of the engine's own, or exceptions: they may outlive all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from streamflow.stages.timing import Mark, WaitKind


class LoopRecord(NamedTuple):
    """An event of the engine, as the loop published it: its fields in their order, without device events.

    ``fetch`` numbers fetches (None: it has nothing to do with one).
    """

    at: float
    kind: str
    values: tuple[object, ...]
    fetch: int | None


class QueueRecord(NamedTuple):
    """The loop began a fetch: the time its device calls took. ``block`` None: of a component that moves as a whole."""

    block: int | None
    fetch: int | None
    started: float
    ended: float


class CopyRecord(NamedTuple):
    """Work on a copy stream. ``nbytes`` 0: no copy, but another step (unpacking)."""

    stream: str
    block: int | None
    fetch: int | None
    nbytes: int
    begin: Mark
    end: Mark


class GatherRecord(NamedTuple):
    """A gather on a communication stream; ``number`` counts all of its stream from 0 on, the same on every rank.

    ``begin`` is when this rank had come to it. ``nbytes`` came from the others. ``block`` None: of no block; ``fetch``
    None: of a block that stays on the device.
    """

    stream: str
    number: int
    block: int | None
    fetch: int | None
    nbytes: int
    begin: Mark
    end: Mark


class PackRecord(NamedTuple):
    """A packing thread took up a chunk, found its buffer free, and had packed it."""

    thread: str
    block: int | None
    fetch: int | None
    nbytes: int
    taken_up: float
    began: float
    ended: float


class RunRecord(NamedTuple):
    """A block ran: on the host's clock its work was queued, on the device it was done."""

    place: int
    pass_id: int
    block: int
    fetch: int | None
    entered: float
    left: float
    begin: Mark
    end: Mark


class WaitRecord(NamedTuple):
    """A compute thread stood still."""

    place: int
    kind: WaitKind
    block: int | None
    started: float
    ended: float


class PassRecord(NamedTuple):
    """A pass, as its compute thread saw it."""

    place: int
    pass_id: int
    begun: float
    ended: float


class MemoryRecord(NamedTuple):
    """Device bytes at a moment; ``num_retries``: how often the allocator had to give its cache back so far."""

    at: float
    in_use: int
    cached: int | None
    free: int | None
    num_retries: int | None


class AllocationRecord(NamedTuple):
    """The engine allocated device memory."""

    nbytes: int
    started: float
    ended: float


Record = (
    LoopRecord
    | QueueRecord
    | CopyRecord
    | GatherRecord
    | PackRecord
    | RunRecord
    | WaitRecord
    | PassRecord
    | MemoryRecord
    | AllocationRecord
)
