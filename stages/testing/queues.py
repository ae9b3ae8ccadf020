"""The queues of the sim device, and the one place where it is decided what happens next. No torch.

One lock guards everything. Work runs without it, so that a piece of work may block while others queue more, but one
piece at a time.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import attrs

from streamflow.stages.errors import DeviceStreamError, StreamflowError

#: How often a queue is chosen, relative to others: one number for each, so that some seeds starve a stream.
PACES = (1, 10, 100)
#: How many entries may happen when somebody asks whether an event has happened.
SMALL_MOVES = (0, 0, 1, 2, 5)


class SimStuckError(StreamflowError, RuntimeError):
    """A thread waits for an event of the sim device that nothing can bring about. ``heads``: what each queue is at."""

    def __init__(self, stream: str, heads: Mapping[str, str]) -> None:
        self.stream, self.heads = stream, dict(heads)
        at = ", ".join(f"{name} at {head}" for name, head in heads.items()) or "all queues are empty"
        super().__init__(f"an event of {stream!r} cannot happen any more ({at}); something was never queued")


class SimLeftoverError(StreamflowError, RuntimeError):
    """The sim device was closed in use. ``queued`` counts the entries left by stream."""

    def __init__(self, queued: Mapping[str, int], in_use_bytes: int, num_buffers: int, num_page_locks: int) -> None:
        self.queued, self.in_use_bytes = dict(queued), in_use_bytes
        self.num_buffers, self.num_page_locks = num_buffers, num_page_locks
        super().__init__(
            f"the sim device was closed with work queued ({self.queued}) and with {num_buffers} buffers of "
            f"{in_use_bytes} bytes and {num_page_locks} page locks in use; wait for the streams and free it all first"
        )


class NotYet(Exception):
    """Work that was begun must wait: its queue stays at it until ``is_ready`` answers True, and then does it again.

    What changes the answer is other work of the machine, or is followed by `Machine.look_again`.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.is_ready = is_ready
        super().__init__("it must wait")


@attrs.define(eq=False)
class Mark:
    """A recorded point: whether it was reached, and what had failed before it by then (None: nothing)."""

    stream: str
    happened: bool = False
    failure: BaseException | None = None


@attrs.frozen(eq=False)
class Work:
    """Something to do."""

    do: Callable[[], None]


@attrs.frozen(eq=False)
class Reach:
    """A mark to set."""

    mark: Mark


@attrs.frozen(eq=False)
class Await:
    """A mark of any queue that must have been reached before this queue moves on."""

    mark: Mark


Entry = Work | Reach | Await


@attrs.define(eq=False)
class SimQueue:
    """What is left to do on one stream. After a failure its work is skipped, and its marks carry the failure."""

    name: str
    pace: int
    entries: deque[Entry] = attrs.field(factory=deque)
    held: bool = False
    failure: BaseException | None = None
    is_ready: Callable[[], bool] | None = None

    @property
    def waits_outside(self) -> bool:
        """Whether it may move on by what is no work of the machine."""
        return bool(self.entries) and (self.held or self.is_ready is not None)

    def can_move(self) -> bool:
        """Whether the first entry may happen now."""
        if self.held or not self.entries or (self.is_ready is not None and not self.is_ready()):
            return False
        head = self.entries[0]
        return not isinstance(head, Await) or head.mark.happened

    def do(self, entry: Entry) -> None:
        """Let ``entry``, the former head, happen."""
        self.is_ready = None
        match entry:
            case Reach(mark):
                mark.failure, mark.happened = self.failure, True
            case Await(mark):
                if self.failure is None and mark.failure is not None:
                    self.failure = DeviceStreamError(mark.stream, mark.failure)
            case Work(do):
                self._try(do)

    def _try(self, do: Callable[[], None]) -> None:
        if self.failure is None:
            try:
                do()
            except NotYet as waiting:
                self.entries.appendleft(Work(do))
                self.is_ready = waiting.is_ready
            except BaseException as failure:
                self.failure = failure

    def describe_head(self) -> str:
        """What the queue stands before, for errors."""
        match self.entries[0]:
            case Await(mark):
                return f"a wait for {mark.stream!r}"
            case Reach():
                return "an event"
            case Work():
                return "work"


class Machine:
    """All queues of a device, or of several, moved one entry at a time by the threads that look at it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition(threading.Lock())
        self._queues: list[SimQueue] = []
        self._moving: int | None = None

    def add_queue(self, name: str) -> SimQueue:
        """A new, empty queue."""
        with self._changed:
            queue = SimQueue(name, self._random.choice(PACES))
            self._queues.append(queue)
            return queue

    def add_work(self, queue: SimQueue, do: Callable[[], None]) -> None:
        """Queue something to do."""
        self._add(queue, Work(do))

    def add_wait(self, queue: SimQueue, mark: Mark) -> None:
        """Let what is queued from here on happen only after ``mark``."""
        self._add(queue, Await(mark))

    def add_mark(self, queue: SimQueue) -> Mark:
        """A mark that is reached once everything queued so far has happened."""
        mark = Mark(queue.name)
        self._add(queue, Reach(mark))
        return mark

    def _add(self, queue: SimQueue, entry: Entry) -> None:
        with self._changed:
            queue.entries.append(entry)
            self._changed.notify_all()

    def move_a_little(self, mark: Mark) -> None:
        """Let a few entries happen, or none; stops at ``mark``, and where another thread moves the machine already."""
        with self._changed:
            for _ in range(self._random.choice(SMALL_MOVES)):
                if mark.happened or self._moving is not None or not self._move():
                    return

    def move_until(self, mark: Mark) -> None:
        """Let entries happen until ``mark`` is reached.

        :raises SimStuckError: if it cannot be.
        """
        self._move_while(lambda: not mark.happened, mark.stream)

    def drain(self) -> None:
        """Let entries happen until none is left.

        :raises SimStuckError: if one cannot.
        """
        self._move_while(lambda: self._moving is not None or any(q.entries for q in self._queues), "any stream")

    def _move_while(self, unfinished: Callable[[], bool], waited_for: str) -> None:
        with self._changed:
            while unfinished():
                if self._moving == threading.get_ident():
                    raise RuntimeError("work on a device stream must not wait for device events on the host")
                if self._moving is not None or not self._move():
                    self._await_change(waited_for)

    def _await_change(self, waited_for: str) -> None:
        if self._moving is None and not any(queue.waits_outside for queue in self._queues):
            heads = {queue.name: queue.describe_head() for queue in self._queues if queue.entries}
            raise SimStuckError(waited_for, heads)
        self._changed.wait()

    def _move(self) -> bool:
        """Let one entry happen, of a random queue that can move; whether there was one. Gives the lock up meanwhile."""
        movable = [queue for queue in self._queues if queue.can_move()]
        if not movable:
            return False
        queue = self._random.choices(movable, [queue.pace for queue in movable])[0]
        entry = queue.entries.popleft()
        self._moving = threading.get_ident()
        self._changed.release()
        try:
            queue.do(entry)
        finally:
            self._changed.acquire()
            self._moving = None
            self._changed.notify_all()
        return True

    def look_again(self) -> None:
        """Something changed that work waits for."""
        with self._changed:
            self._changed.notify_all()

    def set_held(self, queues: Iterable[SimQueue], *, held: bool) -> None:
        """Stop the queues, or let them move."""
        with self._changed:
            for queue in queues:
                queue.held = held
            self._changed.notify_all()

    def num_left(self, queues: Iterable[SimQueue]) -> dict[str, int]:
        """Entries left, by the queue's name; empty ones are left out."""
        left: dict[str, int] = {}
        with self._changed:
            for queue in queues:
                if queue.entries:
                    left[queue.name] = left.get(queue.name, 0) + len(queue.entries)
        return left
