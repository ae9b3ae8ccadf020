"""Hash images on several threads, and hand on what was hashed; cancelled, it ends at the next chunk."""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import TypeAlias

import anyio

from streamflow.stages.threads import ThreadCrew, open_tasks
from streamflow.store.draft import ReadImage

#: What one thread reads and hashes at a time; small enough to stay in a core's cache.
CHUNK_BYTES = 1 << 20
_REPORT_EVERY_S = 0.1

#: ``progress(done, total)`` in bytes; called on the loop, ten times a second at most, and once at the end.
Progress: TypeAlias = Callable[[int, int], None]


class Sink:
    """What becomes of the bytes that are hashed; called by the hashing threads. This one does nothing."""

    #: The most bytes that `run_bytes` asks for: what each thread has a buffer of.
    max_run_bytes = CHUNK_BYTES

    def run_bytes(self, image: int, start: int) -> int:
        """How many bytes of an image to hand over at once, from ``start`` on; at its end there may be fewer."""
        return CHUNK_BYTES

    def write(self, image: int, data: memoryview, start: int) -> None:
        """Bytes of an image, from ``start`` on; each byte comes once."""

    def finish(self, image: int) -> None:
        """All bytes of this image have come."""


class _Stopped(Exception):
    """The hashing was cancelled."""


class _Work:
    """The images that are still to be hashed, largest first, what came of the others, and how far each thread is."""

    def __init__(self, sizes: Sequence[int], read: ReadImage, sink: Sink, num_threads: int) -> None:
        self.digests = [""] * len(sizes)
        self.done_bytes = [0] * num_threads
        self.stop = threading.Event()
        self._sizes, self._read, self._sink = sizes, read, sink
        # next() of a count is one step to Python's threads: each number is given out once
        self._order = sorted(range(len(sizes)), key=lambda image: -sizes[image])
        self._next = count()

    def run(self, thread: int) -> None:
        """Hash images until none is left. Blocks."""
        # a mapping of its own: what malloc gives in this size it keeps when it is freed, for each thread
        buffer = memoryview(mmap.mmap(-1, max(1, min(self._sink.max_run_bytes, max(self._sizes, default=0)))))
        while (number := next(self._next)) < len(self._order):
            image = self._order[number]
            self.digests[image] = self._hash(image, buffer, thread)

    def _hash(self, image: int, buffer: memoryview, thread: int) -> str:
        digest, start = hashlib.sha256(), 0
        while start < self._sizes[image]:
            run = buffer[: min(self._sink.run_bytes(image, start), self._sizes[image] - start)]
            for offset in range(0, run.nbytes, CHUNK_BYTES):
                self._hash_chunk(image, run[offset : offset + CHUNK_BYTES], start + offset, digest)
                self.done_bytes[thread] += min(CHUNK_BYTES, run.nbytes - offset)
            self._sink.write(image, run, start)
            start += run.nbytes
        self._sink.finish(image)
        return digest.hexdigest()

    def _hash_chunk(self, image: int, chunk: memoryview, start: int, digest: hashlib._Hash) -> None:
        if self.stop.is_set():
            raise _Stopped
        self._read(image, chunk, start)
        digest.update(chunk)


async def hash_images(
    sizes: Sequence[int],
    read: ReadImage,
    crew: ThreadCrew,
    num_threads: int,
    *,
    sink: Sink | None = None,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """The SHA-256 of each image, in hexadecimal digits. Each byte is read once, and goes to ``sink`` after its hashing.

    Each thread has a buffer of ``sink.max_run_bytes``.

    A cancelled call, or a failed one, ends at the next chunk of each thread, and not before every thread has.
    """
    num_threads = max(1, min(num_threads, len(sizes)))
    work = _Work(sizes, read, Sink() if sink is None else sink, num_threads)
    async with open_tasks() as reporting:
        if progress is not None:
            reporting.start_soon(_report, work.done_bytes, sum(sizes), progress)
        async with open_tasks() as hashing:
            for thread in range(num_threads):
                job = partial(crew.call, partial(work.run, thread), on_cancel=work.stop.set, name=f"hashing {thread}")
                hashing.start_soon(job)
        reporting.cancel_scope.cancel()
    if progress is not None:
        progress(sum(sizes), sum(sizes))
    return tuple(work.digests)


async def hash_file(read: Callable[[memoryview, int], None], nbytes: int, crew: ThreadCrew) -> str:
    """The SHA-256 of ``nbytes`` that ``read(target, start)`` gives; cancellable as `hash_images` is."""
    (digest,) = await hash_images([nbytes], lambda _, target, start: read(target, start), crew, 1)
    return digest


async def _report(done_bytes: Iterable[int], total: int, progress: Progress) -> None:
    while True:
        await anyio.sleep(_REPORT_EVERY_S)
        progress(sum(done_bytes), total)
