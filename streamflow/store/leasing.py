"""Open one generation of an entry: lock it, then prove everything but the images' bytes."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, suppress

from streamflow.stages.errors import SourceReadError
from streamflow.store.damage import Damage, DamagedEntryError
from streamflow.store.descriptors import Descriptor, open_descriptor, open_inside
from streamflow.store.lease import Lease
from streamflow.store.locks import still_names, try_lock
from streamflow.store.manifest import LEASE_NAME, MANIFEST_NAME
from streamflow.store.manifest_parsing import MAX_MANIFEST_BYTES, ProvenManifest, parse_manifest
from streamflow.store.manifest_values import ManifestError
from streamflow.store.packing import FilePlan
from streamflow.store.root import StoreRoot
from streamflow.store.trust import why_not_trusted
from streamflow.weights.file_reading import read_fully


class GenerationGoneError(Exception):
    """The generation was moved or removed while it was being opened: look again."""


class GenerationBusyError(Exception):
    """The generation is being evicted by somebody, who will succeed or give up in a moment: look again later."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(path)


def open_generation(root: StoreRoot, content_id: str, generation: int) -> Lease:
    """A lease of this generation. Blocks, but waits for nobody; nothing stays open when this raises.

    :raises GenerationGoneError: if it is not there any more.
    :raises GenerationBusyError: if its lock is held by somebody who removes it.
    :raises DamagedEntryError: if anything in it is not as it was published.
    :raises OSError: if the system refuses for reasons that are not the entry's: permissions, too many open files ...
    """
    path = root.paths.generation(content_id, generation)
    with ExitStack() as undo:
        folder = undo.enter_context(_open_folder(root, path))
        lock = undo.enter_context(_lock(root, path, folder))
        _check_trust(root, folder, root.options.dir_mode)
        proven = _read_manifest(root, folder, content_id)
        _check_names(folder, proven)
        data = [undo.enter_context(_open_data(root, folder, file)) for file in proven.plan.files]
        with suppress(OSError):  # somebody else's entry, or a full disk: eviction then takes it for older than it is
            root.files.touch(lock.fileno())
        undo.pop_all()
    folder.close()
    return Lease(path, generation, proven.manifest, proven.plan, lock, data)


def _open_folder(root: StoreRoot, path: str) -> Descriptor:
    parent, name = os.path.split(path)
    try:
        with open_descriptor(root.files, parent, os.O_RDONLY | os.O_DIRECTORY) as entry:
            _check_trust(root, entry, root.options.dir_mode)
            return open_inside(entry, name, os.O_DIRECTORY)
    except FileNotFoundError as failure:
        raise GenerationGoneError(path) from failure
    except NotADirectoryError as failure:
        raise DamagedEntryError(Damage.SYMLINK, f"{path} is a file or a symlink, not a folder") from failure


def _lock(root: StoreRoot, path: str, folder: Descriptor) -> Descriptor:
    """The shared lock of the generation that ``path`` names now, and not of one that was just moved from there."""
    try:
        lock = _open_file(root, folder, LEASE_NAME)
    except DamagedEntryError:
        if not still_names(path, folder):
            raise GenerationGoneError(path) from None
        raise
    try:
        if not try_lock(root.files, lock, exclusive=False):
            raise GenerationBusyError(path)
        if not still_names(path, folder):
            raise GenerationGoneError(path)
    except BaseException:
        lock.close()
        raise
    return lock


def _read_manifest(root: StoreRoot, folder: Descriptor, content_id: str) -> ProvenManifest:
    with _open_file(root, folder, MANIFEST_NAME) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > MAX_MANIFEST_BYTES:
            raise DamagedEntryError(Damage.MANIFEST, f"it has {nbytes:,} bytes, more than any manifest")
        data = _read(file, nbytes, Damage.MANIFEST)
    try:
        return parse_manifest(data, content_id)
    except ManifestError as failure:
        raise DamagedEntryError(Damage.MANIFEST, str(failure)) from failure


def _check_names(folder: Descriptor, proven: ProvenManifest) -> None:
    expected = {MANIFEST_NAME, LEASE_NAME, *(file.name for file in proven.plan.files)}
    found = set(os.listdir(folder.fileno()))
    if expected - found:
        raise DamagedEntryError(Damage.MISSING, f"there is no {', '.join(sorted(expected - found))}")
    if found - expected:
        raise DamagedEntryError(Damage.EXTRA, f"{', '.join(sorted(map(repr, found - expected)))} does not belong there")


def _open_data(root: StoreRoot, folder: Descriptor, file: FilePlan) -> Descriptor:
    """A file of weights that has the size and, byte for byte, the header that the manifest implies."""
    data = _open_file(root, folder, file.name)
    try:
        found = os.fstat(data.fileno()).st_size
        if found != file.nbytes:
            raise DamagedEntryError(Damage.TRUNCATED, f"{file.name} has {found:,} bytes, not {file.nbytes:,}")
        if _read(data, len(file.header), Damage.HEADER) != file.header:
            raise DamagedEntryError(Damage.HEADER, f"{file.name} does not begin with the header that belongs to it")
    except BaseException:
        data.close()
        raise
    return data


def _open_file(root: StoreRoot, folder: Descriptor, name: str) -> Descriptor:
    """A regular file of the entry, which nobody but those who are trusted can have changed."""
    try:
        file = open_inside(folder, name, 0)
    except FileNotFoundError as failure:
        raise DamagedEntryError(Damage.MISSING, f"there is no {name}") from failure
    except OSError as failure:
        if failure.errno == errno.ELOOP:
            raise DamagedEntryError(Damage.SYMLINK, f"{name} is a symlink") from failure
        raise
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DamagedEntryError(Damage.SYMLINK, f"{name} is not a regular file")
        _check_trust(root, file, root.options.file_mode)
    except BaseException:
        file.close()
        raise
    return file


def _check_trust(root: StoreRoot, opened: Descriptor, mode: int) -> None:
    reason = why_not_trusted(os.fstat(opened.fileno()), mode)
    if reason is not None:
        raise DamagedEntryError(Damage.WRITABLE, f"{opened.path}: {reason}")


def _read(file: Descriptor, nbytes: int, damage: Damage) -> bytes:
    data = bytearray(nbytes)
    try:
        read_fully(file.fileno(), memoryview(data), 0, file.path, nbytes)
    except SourceReadError as failure:
        raise DamagedEntryError(damage, str(failure)) from failure
    return bytes(data)
