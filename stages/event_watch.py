"""Telling that device events have happened: a thread waits for them, so that the loop need not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from streamflow.stages.devices.base import Event
from streamflow.stages.errors import DeviceStreamError
from streamflow.stages.threads import WorkerThread


class EventWatch:
    """A thread that waits for events, one after the other, and tells of each. ``open_thread`` gives it, at first need;
    the thread stays its owner's.
    """

    def __init__(self, open_thread: Callable[[], WorkerThread]) -> None:
        self._open_thread = open_thread
        self._thread: WorkerThread | None = None

    def when_happened(self, event: Event, then: Callable[[], object]) -> None:
        """Call ``then``, in the thread, once ``event`` has happened, or the work before it has failed: of that, whoever
        needs the work is told. On the loop.
        """

        def wait_and_tell() -> None:
            with suppress(DeviceStreamError):
                event.wait()
            then()

        if self._thread is None:
            self._thread = self._open_thread()
        self._thread.submit(wait_and_tell)
