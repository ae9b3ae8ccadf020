"""The clock of a CUDA device: timing events, related to the host's clock by anchors.

An anchor is an event on a stream of its own whose moment the host knows: it waited for it, a few times, and takes the
time when it had to wait least. The error is half of that wait (about 10 us); what the two clocks drift apart until the
next `sync` comes on top (parts per million). Anchors are never reused, all other events are.
"""

from __future__ import annotations

import time
from collections import deque

import attrs
import torch

from streamflow.stages.devices.base import Stream
from streamflow.stages.devices.cuda import CudaStream
from streamflow.stages.timing import Mark

#: Marks whose events are still to be read and given back; older ones are read when somebody asks.
MAX_PENDING = 4096
#: Pending marks that are left alone: those before them have happened by all likelihood, so that nobody need ask.
READ_BEHIND = 64
#: Older ones that are read with each new one: more than one, so that they do not pile up.
READ_AT_ONCE = 2
#: How often an anchor is tried.
ANCHOR_TRIES = 8


@attrs.frozen(eq=False)
class _Anchor:
    event: torch.cuda.Event
    host_s: float


class _CudaMark:
    __slots__ = ("_anchor", "_at", "_event", "_free")

    def __init__(self, anchor: _Anchor, event: torch.cuda.Event, free: deque[torch.cuda.Event]) -> None:
        self._anchor, self._free = anchor, free
        self._event: torch.cuda.Event | None = event
        self._at: float | None = None

    def seconds(self) -> float | None:
        event = self._event
        if event is not None:
            try:
                self._at = self._anchor.host_s + self._anchor.event.elapsed_time(event) / 1e3
            except (RuntimeError, ValueError):  # it has not happened, or the device failed
                return None
            self._event = None
            self._free.append(event)
        return self._at


@attrs.frozen
class _Unknown:
    """A mark that could not be made."""

    def seconds(self) -> None:
        return None


class CudaClock:
    """Marks of the CUDA device that ``stream`` belongs to, which the clock has for itself.

    It is to be `sync`-ed before the first mark.
    """

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream.raw
        self._anchor: _Anchor | None = None
        self._free: deque[torch.cuda.Event] = deque(maxlen=MAX_PENDING)
        self._pending: deque[_CudaMark] = deque(maxlen=MAX_PENDING)

    def sync(self) -> None:
        best: tuple[float, _Anchor] | None = None
        for _ in range(ANCHOR_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record(self._stream)
            event.synchronize()
            waited = time.perf_counter() - before
            if best is None or waited < best[0]:
                best = waited, _Anchor(event, before + waited / 2)
        if best is not None:
            self._anchor = best[1]

    def mark(self, stream: Stream) -> Mark:
        if not isinstance(stream, CudaStream) or self._anchor is None:
            return _Unknown()
        try:
            event = self._free.popleft()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        try:
            event.record(stream.raw)
        except RuntimeError:
            return _Unknown()
        mark = _CudaMark(self._anchor, event, self._free)
        self._read_some()
        self._pending.append(mark)
        return mark

    def _read_some(self) -> None:
        for _ in range(READ_AT_ONCE):
            if len(self._pending) <= READ_BEHIND:
                return
            try:
                oldest = self._pending.popleft()
            except IndexError:  # other threads take from it, too
                return
            if oldest.seconds() is None:
                self._pending.appendleft(oldest)
                return
