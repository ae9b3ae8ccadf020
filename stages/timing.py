"""What the engine's parts tell a trace about times, and the clock of a device. Nothing is told where nobody watches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

from streamflow.stages.devices.base import Stream

#: Why a compute thread stood still: the block's fetch was not issued yet; on a host device, its copy was not done yet;
#: the thread was as far ahead of the device as it may be.
WaitKind = Literal["mailbox", "event", "run_ahead"]
#: Told for each packed chunk, in the packing thread: the image, bytes, and when the thread took the chunk up, when its
#: buffer was free, and when it was packed.
OnPacked = Callable[[str, int, float, float, float], None]


class PlaceWatch(Protocol):
    """Told by a place's compute thread what it does. Must neither fail nor block. Times are of `time.perf_counter`."""

    def pass_begun(self, pass_id: int) -> None:
        """A pass begins here."""

    def pass_ended(self, pass_id: int) -> None:
        """It is over."""

    def waited(self, kind: WaitKind, block: int | None, started: float) -> None:
        """The thread stood still from ``started`` until now; before ``block`` (None: before none in particular)."""

    def entered(self, pass_id: int, block: int) -> None:
        """The block's work is queued from here on."""

    def left(self, pass_id: int, block: int) -> None:
        """All of the block's work is queued."""


class Mark(Protocol):
    """A point in a stream's work, with its time."""

    def seconds(self) -> float | None:
        """When it happened, on the clock of `time.perf_counter`; None if it has not, or never will. Never blocks."""


class DeviceClock(Protocol):
    """Marks on the streams of one device, all on the host's clock."""

    def mark(self, stream: Stream) -> Mark:
        """The point where everything queued on ``stream`` so far is done. From any thread; never fails."""

    def sync(self) -> None:
        """Relate the device's clock to the host's anew. Blocks the calling thread, never the loop."""


class _HostMark:
    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: float | None = None

    def happen(self) -> None:
        self._at = time.perf_counter()

    def seconds(self) -> float | None:
        return self._at


class HostClock:
    """The clock where streams run in threads: each reads the host's own when it gets to the mark."""

    def mark(self, stream: Stream) -> Mark:
        mark = _HostMark()
        stream.submit(mark.happen)
        return mark

    def sync(self) -> None:
        pass
