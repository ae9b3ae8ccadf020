"""Devices on which a test decides when copies happen, or where the host is not the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from streamflow.stages.devices.base import Stream
from streamflow.stages.devices.cpu import CpuCopyStream, CpuDevice
from streamflow.stages.threads import ThreadCrew, WorkerThread


class FarCpuDevice(CpuDevice):
    """The host, taken for an accelerator: blocks are copied from page-locked images, and all other tensors move there.

    torch tells "cpu:0" from "cpu", and computes on both together.
    """

    is_host = False
    torch_device = torch.device("cpu", 0)


class _GatedStream(CpuCopyStream):
    def __init__(self, name: str, thread: WorkerThread, permits: threading.Semaphore) -> None:
        super().__init__(name, thread, None)
        self._permits = permits

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.submit(self._wait_for_permit)
        super().copy(target, source)

    def _wait_for_permit(self) -> None:
        self._permits.acquire()


class GatedCpuDevice(FarCpuDevice):
    """Copies (one for each block) happen one by one, as a test allows them. Closing waits for those under way."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = threading.Semaphore(0)
        self._gated_crew: ThreadCrew | None = None

    async def open(self, crew: ThreadCrew) -> None:
        await super().open(crew)
        self._gated_crew = crew

    def open_copy_stream(self, name: str) -> Stream:
        assert self._gated_crew is not None
        return _GatedStream(name, self._gated_crew.start(f"streamflow {name} stream"), self._permits)

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
