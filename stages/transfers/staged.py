"""Staged transfer: several threads pack chunks into page-locked buffers; each chunk is copied once it is packed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import attrs
import torch

from streamflow.stages.devices.base import Device, Event, Located, Registrar, Stream
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import BlockImage
from streamflow.stages.layout import align_up
from streamflow.stages.ranks.slices import Run, clip, plan_clips
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import ThreadCrew, WorkerThread, wait_through
from streamflow.stages.timing import OnPacked
from streamflow.stages.transfers.chunks import Chunk, plan_chunks

#: Buffers of each packing thread: one is copied while the next is packed.
BUFFERS_PER_THREAD = 2


class PackingListener(Protocol):
    """Told how the packing of one image goes. In packing threads; must not fail."""

    def copied(self, index: int) -> None:
        """The copy of chunk ``index`` is queued."""

    def packed(self, failure: BaseException | None) -> None:
        """No thread packs any more, because all is queued or ``failure`` came."""


@attrs.define
class _StagingBuffer:
    """A page-locked buffer, and the copy that reads it (None: none)."""

    memory: Located
    reader: Event | None = None

    def wait(self) -> None:
        """Block until nothing reads it."""
        if self.reader is not None and not self.reader.is_done():  # each wait gives the interpreter away
            self.reader.wait()


class _Packing:
    """One image on its way: the packing threads share its chunks, and the last one to finish records the event."""

    def __init__(
        self,
        image: BlockImage,
        chunks: Sequence[Chunk],
        slot: torch.Tensor,
        after: Sequence[Event],
        stream: Stream,
        on_packed: OnPacked | None,
        listener: PackingListener | None = None,
    ) -> None:
        self._image, self._chunks, self._slot = image, chunks, Located(slot)
        self._listener = listener
        self._after: Sequence[Event] | None = after
        self._stream = stream
        self._on_packed = on_packed
        self._next_chunk = itertools.count()
        self._lock = threading.Lock()
        self._num_unfinished = 0
        self._issued = LoopEvent()
        self._abandoned = False
        self._failure: BaseException | None = None
        self.event: Event | None = None

    def begin(self, threads: Sequence[_PackingThread]) -> None:
        """Give every thread its share; the chunks go to whichever is free."""
        helpers = threads[: max(1, len(self._chunks))]
        self._num_unfinished = len(helpers)
        for helper in helpers:
            helper.pack(self)

    def work(self, thread: _PackingThread) -> None:
        """Pack chunks until none is left. In a packing thread."""
        try:
            thread.enter_stream()
            for index in self._next_chunk:
                if index >= len(self._chunks) or self._abandoned or self._failure is not None:
                    break
                self._pack(self._chunks[index], next(thread.buffers))
                if self._listener is not None:
                    self._listener.copied(index)
        except BaseException as failure:
            self._failure = failure
        finally:
            self._finish_one()

    def _pack(self, chunk: Chunk, buffer: _StagingBuffer) -> None:
        # Nothing of this is in the processor's caches, for the chunk before went through them, and all of it holds the
        # interpreter: so no tensor is touched, and no clock is read that nobody asked for.
        if self._on_packed is None:
            buffer.wait()
            self._read(chunk, buffer)
        else:
            taken_up = time.perf_counter()
            buffer.wait()
            began = time.perf_counter()
            self._read(chunk, buffer)
            self._on_packed(self._image.name, chunk.nbytes, taken_up, began, time.perf_counter())
        self._wait_for_slot()
        self._stream.copy_part(self._slot, chunk.image_offset, buffer.memory, chunk.nbytes)
        buffer.reader = self._stream.record(buffer.reader)

    def _read(self, chunk: Chunk, buffer: _StagingBuffer) -> None:
        base, pieces = buffer.memory.address, self._image.pieces
        for part in chunk.parts:
            pieces[part.piece].read_into(base + part.chunk_offset, part.start, part.nbytes)

    def _wait_for_slot(self) -> None:
        # As late as possible: the stream is shared with the block before, whose last chunks must not wait for our slot.
        if self._after is None:  # set by whoever waited, once all waits were queued
            return
        with self._lock:
            for event in self._after or ():
                self._stream.wait(event)
            self._after = None

    def _finish_one(self) -> None:
        with self._lock:
            self._num_unfinished -= 1
            if self._num_unfinished:
                return
        try:
            if self._failure is None:
                self._wait_for_slot()
                self.event = self._stream.record()
        except BaseException as failure:
            self._failure = failure
        del self._slot  # a cancelled fetch may stay in a traceback, and must not keep device memory with it
        if self._listener is not None:
            self._listener.packed(self._failure)
        self._issued.set()

    async def issued(self) -> Event:
        try:
            await self._issued.wait()
        except BaseException:
            self._abandoned = True
            await wait_through(self._issued)
            raise
        if self._failure is not None:
            raise self._failure
        if self.event is None:
            raise RuntimeError("a packing finished without an event")  # pragma: no cover - set before _issued
        return self.event


class _PackingThread:
    """A worker thread with staging buffers of its own, so that no two threads contend for one."""

    def __init__(self, thread: WorkerThread, stream: Stream, buffers: Sequence[_StagingBuffer]) -> None:
        self._thread, self._stream = thread, stream
        self._entered: ExitStack | None = None
        self.buffers = itertools.cycle(buffers)

    def pack(self, packing: _Packing) -> None:
        self._thread.submit(lambda: packing.work(self))

    def enter_stream(self) -> None:
        """Let what the thread queues go to the stream, until `close`. In the thread."""
        if self._entered is None:
            with ExitStack() as entering:
                entering.enter_context(self._stream.activate())
                self._entered = entering.pop_all()

    def close(self) -> None:
        """Leave the stream: the thread is lent, and goes back to its pool when it ends."""
        self._thread.submit(self._leave_stream)

    def _leave_stream(self) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None


class StagedTransfer:
    """Packs with a few threads, in chunks, and copies on one stream. Made by `open_staged`."""

    name = "staged"
    scratch_bytes = 0

    def __init__(
        self,
        stream: Stream,
        chunks: Mapping[str, Sequence[Chunk]],
        threads: Sequence[_PackingThread],
        memory: _LockedMemory,
        on_packed: OnPacked | None,
    ) -> None:
        self._stream = stream
        self._chunks = chunks
        self._threads = threads
        self._memory = memory
        self._on_packed = on_packed

    @property
    def staging_bytes(self) -> int:
        return self._memory.memory.numel()

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> _Packing:
        return self._begin(image, slot, after, None)

    def chunks_of(self, image: BlockImage) -> Sequence[Chunk]:
        """What of ``image`` is packed, in order."""
        return self._chunks[image.name]

    def pack(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event], listener: PackingListener) -> None:
        """`fetch` for a caller who hears of every chunk. Nobody can cancel it: the caller waits for the listener."""
        self._begin(image, slot, after, listener)

    def _begin(
        self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event], listener: PackingListener | None
    ) -> _Packing:
        packing = _Packing(image, self._chunks[image.name], slot, after, self._stream, self._on_packed, listener)
        packing.begin(self._threads)
        return packing

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
        self._memory.release()


class _LockedMemory:
    """Page-locked host memory of exactly ``nbytes``."""

    def __init__(self, registrar: Registrar, nbytes: int) -> None:
        self.memory = allocate_host(nbytes)
        self._lock = PageLock(registrar, self.memory) if nbytes else None

    def release(self) -> None:
        """Unlock it. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


async def open_staged(
    device: Device,
    stream: Stream,
    crew: ThreadCrew,
    images: Sequence[BlockImage],
    *,
    num_threads: int,
    chunk_bytes: int,
    on_packed: OnPacked | None = None,
    runs: Mapping[str, Sequence[Run]] | None = None,
) -> StagedTransfer:
    """A staged transfer for ``images`` with ``num_threads`` threads of ``crew``, which copies on ``stream``.

    It holds two chunks of page-locked host memory for each thread, until it is closed. ``on_packed`` is told of every
    chunk (None: nobody is). ``runs``: by name, those images of which only these runs are packed (None: all are whole).

    :raises HostRegistrationError: if they cannot be page-locked; nothing is held then.
    """
    chunks = {image.name: _chunks_of(image, chunk_bytes, runs or {}) for image in images}
    size = align_up(max((chunk.nbytes for planned in chunks.values() for chunk in planned), default=0))
    total = size * num_threads * BUFFERS_PER_THREAD
    locked = await crew.call(
        lambda: _LockedMemory(device.registrar, total), undo=_LockedMemory.release, name="page-locking"
    )
    num_buffers = num_threads * BUFFERS_PER_THREAD
    buffers = [_StagingBuffer(Located(locked.memory[i * size : (i + 1) * size])) for i in range(num_buffers)]
    threads = [
        _PackingThread(crew.start(f"streamflow packing {i}"), stream, buffers[i::num_threads])
        for i in range(num_threads)
    ]
    return StagedTransfer(stream, chunks, threads, locked, on_packed)


def _chunks_of(image: BlockImage, chunk_bytes: int, runs: Mapping[str, Sequence[Run]]) -> tuple[Chunk, ...]:
    if image.name not in runs:
        return plan_chunks(image.pieces, chunk_bytes)
    clipped = clip(image.pieces, runs[image.name])
    return tuple(itertools.chain.from_iterable(plan_clips(clips, chunk_bytes) for clips in clipped))
