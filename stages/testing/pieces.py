"""Scripted sources: pieces of a block image that block, fail, dawdle, or cannot be cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs

from streamflow.stages.errors import SourceReadError
from streamflow.stages.images import Piece


@attrs.define(eq=False)
class WrappedPiece:
    """Another piece, as it is but for being in memory: it has to be read. Base of the scripted ones."""

    inner: Piece

    @property
    def offset_bytes(self) -> int:
        return self.inner.offset_bytes

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def stored_bytes(self) -> int:
        return self.inner.stored_bytes

    @property
    def splittable(self) -> bool:
        return self.inner.splittable

    runs = ()
    page_locked = False

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        self.inner.read_into(address, start, nbytes)


@attrs.define(eq=False)
class GatedPiece(WrappedPiece):
    """Every read says that it was ``entered`` and then blocks until ``gate`` is set."""

    gate: threading.Event = attrs.field(factory=threading.Event)
    entered: threading.Event = attrs.field(factory=threading.Event)

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        self.entered.set()
        self.gate.wait()
        self.inner.read_into(address, start, nbytes)


def _truncated() -> Exception:
    return SourceReadError("scripted source", 0, 1, 0, "the test wants it so")


@attrs.define(eq=False)
class FailingPiece(WrappedPiece):
    """The read number ``fails_at`` (from 0) and all later ones fail with what ``failure`` makes."""

    fails_at: int = 0
    failure: Callable[[], BaseException] = _truncated
    num_reads: int = 0
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        with self._lock:
            read, self.num_reads = self.num_reads, self.num_reads + 1
        if read >= self.fails_at:
            raise self.failure()
        self.inner.read_into(address, start, nbytes)


@attrs.define(eq=False)
class SlowPiece(WrappedPiece):
    """Every read takes ``delay_s`` longer, slept without the interpreter's lock as a disk read would be."""

    delay_s: float = 0.01

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        time.sleep(self.delay_s)
        self.inner.read_into(address, start, nbytes)


@attrs.define(eq=False)
class WholePiece(WrappedPiece):
    """A piece that can be read only as a whole, as one whose stored form is a code.

    Asking for less is the transfer's fault: a ValueError.
    """

    @property
    def splittable(self) -> bool:
        return False

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        if (start, nbytes) != (0, self.nbytes):
            raise ValueError(f"bytes {start} to {start + nbytes} were asked of a piece that has only all {self.nbytes}")
        self.inner.read_into(address, start, nbytes)
