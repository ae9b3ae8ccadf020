"""Devices on which a test decides when copies happen, or where the host is not the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from streamflow.stages.devices.base import Event, Stream
from streamflow.stages.devices.cpu import CpuCopyStream, CpuDevice, CpuEvent
from streamflow.stages.testing.registrar import ScriptedRegistrar
from streamflow.stages.threads import ThreadCrew, WorkerThread


class FarCpuDevice(CpuDevice):
    """The host, taken for an accelerator: blocks are copied from page-locked images, and all other tensors move there.

    torch tells "cpu:0" from "cpu", and computes on both together.
    """

    is_host = False
    torch_device = torch.device("cpu", 0)


class _GatedStream(CpuCopyStream):
    def __init__(self, name: str, thread: WorkerThread, device: GatedCpuDevice) -> None:
        super().__init__(name, thread, None)
        self._device = device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._device.note_pending(+1)
        self.submit(self._device.wait_for_permit)
        super().copy(target, source)
        self.submit(lambda: self._device.note_pending(-1))

    def record(self, reuse: Event | None = None) -> CpuEvent:
        self._device.on_record()
        return super().record(reuse)


class GatedCpuDevice(FarCpuDevice):
    """Copies (one for each block) happen one by one, as a test allows them. Closing waits for those under way.

    ``num_pending`` copies were asked for and have not happened; ``pending_at_free`` says how many whenever a buffer was
    freed. ``on_record`` is called before a copy stream records an event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_pending = 0
        self.pending_at_free: list[int] = []
        self.on_record: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._permits = threading.Semaphore(0)
        self._gated_crew: ThreadCrew | None = None

    async def open(self, crew: ThreadCrew) -> None:
        await super().open(crew)
        self._gated_crew = crew

    def open_copy_stream(self, name: str) -> Stream:
        assert self._gated_crew is not None
        return _GatedStream(name, self._gated_crew.start(f"streamflow {name} stream"), self)

    def free(self, buffer: torch.Tensor) -> None:
        self.pending_at_free.append(self.num_pending)
        self.allow_all()  # nothing may be pending; if something is, let the test end and see it
        super().free(buffer)

    def wait_for_permit(self) -> None:
        """Block until a test allows one more copy."""
        self._permits.acquire()

    def note_pending(self, change: int) -> None:
        """So many more copies are pending. Any thread."""
        with self._lock:
            self.num_pending += change

    def allow(self, num_copies: int) -> None:
        """Let so many copies happen."""
        self._permits.release(num_copies)

    def allow_all(self) -> None:
        """Let every copy happen from here on (ten thousand)."""
        self._permits.release(10_000)

    @contextmanager
    def gated(self) -> Iterator[None]:
        """Copies are held back at most until this is left, so that a failing test ends."""
        try:
            yield
        finally:
            self.allow_all()


class _CheckedStream(CpuCopyStream):
    def __init__(self, name: str, thread: WorkerThread, registrar: ScriptedRegistrar) -> None:
        super().__init__(name, thread, None)
        self._registrar = registrar

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        start, end = source.data_ptr(), source.data_ptr() + source.numel()
        homes = [base for base, size in self._registrar.registered.items() if base <= start and end <= base + size]
        assert homes, "a copy of memory that is not registered, or that crosses the end of a range"
        super().copy(target, source)


class RegisteringDevice(FarCpuDevice):
    """An accelerator that registers host memory, and copies only what lies in one registered range, as the driver does.

    Any option of `ScriptedRegistrar` may be given.
    """

    def __init__(self, **script: Any) -> None:
        super().__init__()
        self.script = ScriptedRegistrar(**script)
        self.registrar = self.script
        self._checked_crew: ThreadCrew | None = None

    async def open(self, crew: ThreadCrew) -> None:
        await super().open(crew)
        self._checked_crew = crew

    def open_copy_stream(self, name: str) -> Stream:
        assert self._checked_crew is not None
        return _CheckedStream(name, self._checked_crew.start(f"streamflow {name} stream"), self.script)


class FailingCopies(CpuDevice):
    """Every copy on a copy stream fails with ``failure``."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure = failure

    def open_copy_stream(self, name: str) -> Stream:
        stream = super().open_copy_stream(name)
        submit: Callable[..., None] = stream.submit

        def fail() -> None:
            raise self.failure

        stream.copy = lambda target, source: submit(fail)  # type: ignore[method-assign]
        return stream
