"""A cpu device whose copies can be held back."""

from __future__ import annotations

import threading
from collections.abc import Callable

from streamflow.stages.devices.base import Stream
from streamflow.stages.devices.cpu import CpuCopyStream, CpuDevice
from streamflow.stages.threads import ThreadCrew, WorkerThread


class _HeldStream(CpuCopyStream):
    """A copy stream that asks a gate before each piece of work."""

    def __init__(self, name: str, thread: WorkerThread, gate: threading.Event) -> None:
        super().__init__(name, thread, None)
        self._gate = gate

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        def pass_the_gate() -> None:
            self._gate.wait()
            work()

        super().submit(pass_the_gate, nbytes)


class HeldCpuDevice(CpuDevice):
    """Copies queue up while it holds them back, and happen once it lets them go. It starts by letting them go.

    Let them go before the crew is left: its threads run their queues empty.
    """

    def __init__(self, *, memory_limit_bytes: int | None = None) -> None:
        super().__init__(memory_limit_bytes=memory_limit_bytes)
        self._gate = threading.Event()
        self._gate.set()
        self._held_crew: ThreadCrew | None = None

    async def open(self, crew: ThreadCrew) -> None:
        await super().open(crew)
        self._held_crew = crew

    def open_copy_stream(self, name: str) -> Stream:
        if self._held_crew is None:
            return super().open_copy_stream(name)
        return _HeldStream(name, self._held_crew.start(f"streamflow {name} stream"), self._gate)

    def hold(self) -> None:
        """Hold back the copies that have not begun."""
        self._gate.clear()

    def let_go(self) -> None:
        """Let all copies happen, those queued and those to come."""
        self._gate.set()
