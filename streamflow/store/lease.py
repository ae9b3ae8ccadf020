"""The right to use one generation of a stored entry, with everything that has to stay open for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from streamflow.store.descriptors import Descriptor
from streamflow.store.errors import LeaseClosedError, LeaseInUseError, StoreForkedError
from streamflow.store.manifest import Manifest
from streamflow.store.packing import EntryPlan, ImagePlace
from streamflow.weights.errors import CheckpointInUseError
from streamflow.weights.file_mapping import FileMapping, check_range
from streamflow.weights.file_reading import memory_at, read_fully


class Lease:
    """One generation, locked against eviction; owns its descriptors, mappings and shared lock until `close`.

    The generation may be quarantined and replaced meanwhile: this lease goes on with the bytes that it has. Reads may
    come from several threads at once. Not inherited: in a forked child every use raises `StoreForkedError`; only
    `close` does not, which has nothing left to do there.

    Attributes:
        manifest: what is in the files, proven consistent.
        plan: the headers and places that the manifest implies.
        content_id, generation: which entry, and which writing of it.
        path: where it was when it was leased.
    """

    def __init__(
        self,
        path: str,
        generation: int,
        manifest: Manifest,
        plan: EntryPlan,
        lock: Descriptor,
        data: Sequence[Descriptor],
    ) -> None:
        self.path, self.generation = path, generation
        self.manifest, self.plan = manifest, plan
        self.content_id = manifest.content_id
        self._lock_file = lock
        self._data = tuple(data)
        self._mappings: dict[int, FileMapping] = {}
        self._num_readers = 0
        self._closed = False
        self._guard = threading.Lock()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._mappings)} of {len(self._data)} files mapped"
        return f"<Lease of {self.path!r}, {self.manifest.nbytes:,} bytes, {state}>"

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def place(self, image: int) -> ImagePlace:
        """Where this image lies: file, offset in it and size, in bytes."""
        return self.manifest.images[image].place

    def read_into(self, image: int, address: int, start: int, nbytes: int) -> None:
        """Put bytes ``start`` to ``start + nbytes`` of an image at ``address``. Blocks; for worker threads.

        :raises SourceReadError: if the file shrank or cannot be read; the memory then holds part of the bytes.
        :raises LeaseClosedError: if the lease is closed.
        :raises StoreForkedError: in a forked child.
        :raises ValueError: if the range is not inside the image.
        """
        place = self._checked(image, start, nbytes)
        if nbytes:  # an empty tensor may have no address
            self.fill_from_file(place.file, memory_at(address, nbytes), place.offset_bytes + start)

    def fill(self, image: int, target: memoryview, start: int) -> None:
        """Fill ``target`` with the image's bytes from ``start`` on; else as `read_into`."""
        place = self._checked(image, start, target.nbytes)
        self.fill_from_file(place.file, target, place.offset_bytes + start)

    def _checked(self, image: int, start: int, nbytes: int) -> ImagePlace:
        """The place of an image that has these bytes."""
        place = self.place(image)
        if start < 0 or nbytes < 0 or start + nbytes > place.nbytes:
            check_range(f"image {image} of {self.path}", start, nbytes, place.nbytes)
        return place

    def fill_from_file(self, file: int, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes of a file from ``offset`` on; else as `read_into`."""
        # The files stay open meanwhile: a reused number would read another file's bytes. This is done for every chunk,
        # with cold caches, where context managers would take a third of the time.
        self._begin_reading()
        try:
            data = self._data[file]
            read_fully(data.fileno(), target, offset, data.path, self.manifest.files[file].nbytes)
        finally:
            with self._guard:
                self._num_readers -= 1

    def _begin_reading(self) -> None:
        self._check_not_forked()
        with self._guard:
            self._check_open()
            self._num_readers += 1

    def mapping(self, file: int) -> FileMapping:
        """The whole file, mapped shared and read-only; made on first use and closed with the lease.

        :raises SourceReadError: if the file shrank or cannot be mapped.
        :raises LeaseClosedError: if the lease is closed.
        :raises StoreForkedError: in a forked child.
        """
        with self._guarded():
            if file not in self._mappings:
                data = self._data[file]
                self._mappings[file] = FileMapping(data.path, data.fileno(), self.manifest.files[file].nbytes)
            return self._mappings[file]

    def fileno(self, file: int) -> int:
        """The descriptor of a file, valid until `close`.

        :raises LeaseClosedError: if the lease is closed.
        :raises StoreForkedError: in a forked child.
        """
        with self._guarded():
            return self._data[file].fileno()

    def close(self) -> None:
        """Unmap, close the files, give the lock back. Idempotent.

        :raises LeaseInUseError: if a read is under way or views of a mapping are alive; the lease stays usable then.
        """
        if self._lock_file.is_forked:
            return
        with self._guard:
            if self._closed:
                return
            if self._num_readers:
                raise LeaseInUseError(self.path, f"{self._num_readers} reads of it are under way")
            self._unmap()
            self._closed = True
            for data in self._data:
                data.close()
            self._lock_file.close()  # last: until here the entry is in use

    def _unmap(self) -> None:
        for file in list(self._mappings):
            try:
                self._mappings[file].close()
            except CheckpointInUseError as failure:
                raise LeaseInUseError(self.path, "views of its mapping are alive") from failure
            del self._mappings[file]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Nobody closes the lease meanwhile."""
        self._check_not_forked()
        with self._guard:
            self._check_open()
            yield

    def _check_not_forked(self) -> None:
        """Before the guard: a thread that did not come along may hold the child's copy of it."""
        if self._lock_file.is_forked:
            raise StoreForkedError(self.path)

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseClosedError(self.path)
