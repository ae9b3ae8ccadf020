"""Write the files of an entry into a temporary folder, each on the disk before the folder gets its name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress

from streamflow.store.descriptors import Descriptor, open_descriptor
from streamflow.store.errors import disk_errors
from streamflow.store.hashing import Sink
from streamflow.store.manifest import LEASE_NAME, MANIFEST_NAME
from streamflow.store.packing import EntryPlan
from streamflow.store.root import StoreRoot
from streamflow.store.space import check_space
from streamflow.store.temporaries import Temporary, make_folder, remove_stale, remove_tree, write_fully

#: An entry is written in pieces that end at multiples of this in their file; each hashing thread has a buffer for one.
#: The page cache keeps what comes in one write in pages as large as it can, and registering takes a time for each page.
WRITE_BYTES = 16 << 20
#: Room for the manifest and the folder themselves.
_EXTRA_BYTES = 4 << 20
_NOBODY_WRITES = ~0o222


class EntryWriter(Sink):
    """A new entry in ``tmp/``: made by `begin`, filled by the hashing threads, completed by `complete`.

    Its owner calls `discard` in the end, whatever became of it: nothing is left in ``tmp/`` and nothing stays open.
    """

    max_run_bytes = WRITE_BYTES

    def __init__(self, root: StoreRoot, plan: EntryPlan, folder: Temporary) -> None:
        self._root, self._plan, self.folder = root, plan, folder
        self._data: list[Descriptor] = []
        self._undo = ExitStack()
        self._left = [len(file.images) for file in plan.files]
        self._counting = threading.Lock()

    @classmethod
    def begin(cls, root: StoreRoot, plan: EntryPlan) -> EntryWriter:
        """The folder with all its files at their full size, holding their headers; blocks.

        What dead writers left behind is removed first: it may be what the disk is full of.

        :raises InsufficientDiskError: if the disk has no room for it.
        """
        with disk_errors("beginning an entry", root.paths.root):
            remove_stale(root.files, root.paths)
            available, disk_bytes = root.files.free_bytes(root.paths.root)
            check_space(root.paths.root, plan.nbytes + _EXTRA_BYTES, available, disk_bytes, root.options)
            writer = cls(root, plan, make_folder(root.files, root.paths, root.options.dir_mode))
            try:
                writer._make_files()
            except BaseException:
                writer.discard()
                raise
            return writer

    def run_bytes(self, image: int, start: int) -> int:
        return WRITE_BYTES - (self._plan.places[image].offset_bytes + start) % WRITE_BYTES

    def write(self, image: int, data: memoryview, start: int) -> None:
        place = self._plan.places[image]
        file = self._data[place.file]
        with disk_errors("writing an entry", file.path):
            write_fully(self._root.files, file.fileno(), data, place.offset_bytes + start)
        # the disk works while the next runs are hashed; the fsync at the end has little left to wait for
        self._root.files.start_writeback(file.fileno(), place.offset_bytes + start, data.nbytes)

    def finish(self, image: int) -> None:
        """The last image of a file brings it to the disk, while other threads go on with the next."""
        number = self._plan.places[image].file
        with self._counting:
            self._left[number] -= 1
            is_complete = self._left[number] == 0
        if is_complete:
            with disk_errors("writing an entry", self._data[number].path):
                self._seal(self._data[number])

    def complete(self, manifest: bytes) -> None:
        """Add the manifest and the file that leases lock, and bring the folder to the disk. Blocks."""
        with disk_errors("completing an entry", self.folder.path):
            for name, data in ((MANIFEST_NAME, manifest), (LEASE_NAME, b"")):
                with self._make_file(name) as file:
                    write_fully(self._root.files, file.fileno(), memoryview(data), 0)
                    self._seal(file)
            folder = self.folder.descriptor.fileno()
            # still to be renamed, which needs the right to write; whoever finds it so after a crash may read it
            self._root.files.fchmod(folder, self._root.options.dir_mode & _NOBODY_WRITES | 0o200)
            self._root.files.fsync(folder)

    def harden(self) -> None:
        """Take the folder's last write permission, once it has its name. Blocks."""
        folder = self.folder.descriptor.fileno()
        self._root.files.fchmod(folder, self._root.options.dir_mode & _NOBODY_WRITES)
        self._root.files.fsync(folder)

    def discard(self) -> None:
        """Close everything, and remove what is still in ``tmp/``. Blocks. Idempotent."""
        self._undo.close()
        with self.folder.descriptor, suppress(OSError):  # what cannot be removed now is left to the next writer
            remove_tree(self._root.files, self.folder.path)

    def _make_files(self) -> None:
        for plan in self._plan.files:
            file = self._undo.enter_context(self._make_file(plan.name))
            self._data.append(file)
            self._root.files.fallocate(file.fileno(), plan.nbytes)
            write_fully(self._root.files, file.fileno(), memoryview(plan.header), 0)
        for file in self._files_without_images():
            self._seal(file)

    def _files_without_images(self) -> Iterable[Descriptor]:
        return (file for file, left in zip(self._data, self._left, strict=True) if left == 0)

    def _make_file(self, name: str) -> Descriptor:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        return open_descriptor(self._root.files, os.path.join(self.folder.path, name), flags, 0o600)

    def _seal(self, file: Descriptor) -> None:
        self._root.files.fchmod(file.fileno(), self._root.options.file_mode & _NOBODY_WRITES)
        self._root.files.fsync(file.fileno())
