"""The sim device: streams are queues, and which queue moves next is drawn from a seed.

A synchronous CPU cannot see a missing wait. Here nothing that was queued happens before somebody looks at the device
(asks whether an event has happened, or waits for one); then entries are taken from the queues in a random order that
the events allow. A copy or a computation that is not ordered after what it needs is sooner or later seen to read the
wrong bytes: buffers are filled with poison when they are allocated and when they are freed.

With one host thread the seed decides everything. With several, it decides among what their timing leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

from streamflow.stages.devices.base import Event, Located, MemoryReading
from streamflow.stages.devices.memory import MemoryMeter
from streamflow.stages.errors import DeviceStreamError
from streamflow.stages.layout import ALIGNMENT_BYTES
from streamflow.stages.slots import POISON
from streamflow.stages.testing.queues import Machine, Mark, SimLeftoverError, SimQueue
from streamflow.stages.testing.registrar import ScriptedRegistrar
from streamflow.stages.threads import ThreadCrew


class SimEvent:
    """A point in a `SimStream`. Asking `is_done` may let the device move a little."""

    def __init__(self, mark: Mark, machine: Machine) -> None:
        self.mark = mark
        self._machine = machine

    def is_done(self) -> bool:
        self._machine.move_a_little(self.mark)
        return self.mark.happened and self.mark.failure is None

    def wait(self) -> None:
        """Let the device move until the event has happened.

        :raises DeviceStreamError: if work before it failed.
        :raises SimStuckError: if nothing that is queued can bring it about.
        """
        self._machine.move_until(self.mark)
        if self.mark.failure is not None:
            raise DeviceStreamError(self.mark.stream, self.mark.failure) from self.mark.failure

    def __repr__(self) -> str:
        return f"SimEvent({self.mark.stream!r}, happened={self.mark.happened})"


class SimStream:
    """A queue of the device. Every method queues and returns."""

    def __init__(self, queue: SimQueue, machine: Machine) -> None:
        self.name = queue.name
        self._queue = queue
        self._machine = machine

    def wait(self, event: Event) -> None:
        if not isinstance(event, SimEvent):
            raise TypeError(f"stream {self.name!r} can wait for sim events only, not for {event!r}")
        self._machine.add_wait(self._queue, event.mark)

    def record(self, reuse: Event | None = None) -> SimEvent:
        return SimEvent(self._machine.add_mark(self._queue), self._machine)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.numel() != source.numel():
            raise ValueError(f"a copy of {source.numel()} bytes does not fit a target of {target.numel()}")
        self.submit(lambda: _copy(target, source))

    def copy_part(self, target: Located, start: int, source: Located, nbytes: int) -> None:
        self.copy(target.part(start, nbytes), source.part(0, nbytes))

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        self._machine.add_work(self._queue, work)

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin_block(self) -> None:
        pass

    def end_block(self) -> None:
        pass


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


class SimDevice:
    """A device whose order of execution is drawn from ``seed``.

    ``memory_limit_bytes``: allocations beyond fail (None: no cap). ``can_lock_pages``: whether page-locking works.
    ``machine``: what moves the streams; devices of several ranks have one together, which then has a seed of its own.
    """

    is_host = False
    torch_device = torch.device("cpu")

    def __init__(
        self,
        seed: int,
        *,
        memory_limit_bytes: int | None = None,
        can_lock_pages: bool = True,
        machine: Machine | None = None,
    ) -> None:
        self._machine = Machine(seed) if machine is None else machine
        self._queues: list[SimQueue] = []
        self._meter = MemoryMeter("sim", memory_limit_bytes)
        self.registrar = ScriptedRegistrar(fails_at=None if can_lock_pages else 0)
        self._buffers: dict[int, torch.Tensor] = {}
        self._caller: SimStream | None = None

    @property
    def num_page_locks(self) -> int:
        """Ranges of host memory that are page-locked now."""
        return len(self.registrar.registered)

    @property
    def link(self) -> Hashable:
        return self

    async def open(self, crew: ThreadCrew) -> None:
        pass

    def open_copy_stream(self, name: str) -> SimStream:
        return self._open_stream(name)

    def open_communication_stream(self, name: str) -> SimStream:
        return self._open_stream(name)

    def open_compute_stream(self, name: str) -> SimStream:
        return self._open_stream(name)

    def _open_stream(self, name: str) -> SimStream:
        queue = self._machine.add_queue(name)
        self._queues.append(queue)
        return SimStream(queue, self._machine)

    def caller_stream(self) -> SimStream:
        if self._caller is None:
            self._caller = self.open_compute_stream("caller")
        return self._caller

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._meter.take(nbytes)
        raw = torch.full((nbytes + ALIGNMENT_BYTES,), POISON, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGNMENT_BYTES
        buffer = raw[start : start + nbytes]
        self._buffers[id(buffer)] = buffer
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Uncount ``buffer`` and poison it.

        :raises ValueError: if it is no buffer of this device, or was freed before.
        """
        if self._buffers.pop(id(buffer), None) is None:
            raise ValueError(f"a buffer of {buffer.numel()} bytes was freed that the sim device does not hold")
        self._meter.give_back(buffer.numel())
        buffer.fill_(POISON)

    def memory(self) -> MemoryReading:
        limit = self._meter.limit_bytes
        free = None if limit is None else limit - self._meter.in_use
        return MemoryReading(self._meter.in_use, self._meter.peak, cached=0, free=free, total=limit)

    def release_cache(self) -> None:
        pass

    # For tests

    def hold(self, stream: str) -> None:
        """Keep the streams of that name from moving until `release`; who waits for them waits.

        :raises KeyError: if there is none.
        """
        self._machine.set_held(self._named(stream), held=True)

    def release(self, stream: str) -> None:
        """Let them move again.

        :raises KeyError: if there is none.
        """
        self._machine.set_held(self._named(stream), held=False)

    def num_queued(self, stream: str) -> int:
        """Entries of the streams of that name that have not happened yet.

        :raises KeyError: if there is none.
        """
        return sum(self._machine.num_left(self._named(stream)).values())

    def _named(self, name: str) -> list[SimQueue]:
        named = [queue for queue in self._queues if queue.name == name]
        if not named:
            raise KeyError(name)
        return named

    def drain(self) -> None:
        """Let everything happen that is queued.

        :raises SimStuckError: if something cannot.
        """
        self._machine.drain()

    def close(self) -> None:
        """Check that nothing was left behind. Idempotent.

        :raises SimLeftoverError: if work is queued, or a buffer or a page lock was not given back.
        """
        queued = self._machine.num_left(self._queues)
        if queued or self._buffers or self.num_page_locks:
            raise SimLeftoverError(queued, self._meter.in_use, len(self._buffers), self.num_page_locks)
