"""Make or check a store's folder: whose it is, what it is on, that its locks work, and that its format is ours."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

import attrs

from streamflow.canonical_json import canonical_json
from streamflow.store.descriptors import Descriptor, open_descriptor
from streamflow.store.errors import LockFailedError, RootRefusedError, StoreFormatError
from streamflow.store.files import FileOperations
from streamflow.store.filesystems import Filesystem, check_filesystem
from streamflow.store.locks import try_lock
from streamflow.store.options import StoreOptions
from streamflow.store.paths import FOLDERS, StorePaths
from streamflow.store.temporaries import sync_folder, write_file
from streamflow.store.trust import why_not_trusted
from streamflow.weights.strict_json import StrictJSONError, load_object

_FORMAT = {"format": "streamflow store", "version": 1}
_READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY


@attrs.frozen
class StoreRoot:
    """A checked folder of a store, and what the system says of it. It owns nothing."""

    paths: StorePaths
    options: StoreOptions
    files: FileOperations
    filesystem: Filesystem


def prepare_root(files: FileOperations, options: StoreOptions) -> StoreRoot:
    """The store's folder, made where it was missing. Blocks; nothing stays open.

    :raises RootRefusedError: if it is no folder, or somebody who is not trusted could change it.
    :raises UnsupportedFilesystemError: if other machines share it.
    :raises StoreFormatError: if the store in it has another format.
    :raises LockFailedError: if locks do not lock there.
    :raises OSError: if the system refuses what has to be done.
    """
    paths = StorePaths(os.path.realpath(options.root))
    _make_folders(files, paths.root, options.dir_mode)
    with _open_root(files, paths.root) as root:
        _check_trust(paths.root, os.fstat(root.fileno()), options.dir_mode)
        filesystem = check_filesystem(paths.root, root.fileno())
    for name in FOLDERS:
        prepare_folder(files, paths.folder(name), options.dir_mode)
    sync_folder(files, paths.root)
    if not os.path.lexists(paths.format_file):  # written last: until then nobody has seen to it
        _sync_above(files, paths.root)
    _check_locks(files, paths, options)
    _check_format(files, paths, options)
    return StoreRoot(paths, options, files, filesystem)


def prepare_folder(files: FileOperations, path: str, mode: int) -> None:
    """The folder at ``path``, made where it was missing, with this mode where it is this user's.

    :raises RootRefusedError: if it is something else, or somebody who is not trusted could change it.
    """
    _make_folder(files, path, mode)
    with _open_root(files, path) as folder:
        status = os.fstat(folder.fileno())
        _check_trust(path, status, mode)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:  # whoever made it died before
            files.fchmod(folder.fileno(), mode)


def open_lock_file(files: FileOperations, path: str, mode: int) -> Descriptor:
    """The lock file at ``path``, made where it was missing. Reading it is enough to lock it."""
    try:
        return open_descriptor(files, path, os.O_RDONLY)
    except FileNotFoundError:
        return _make_lock_file(files, path, mode)


def _make_lock_file(files: FileOperations, path: str, mode: int) -> Descriptor:
    lock = open_descriptor(files, path, os.O_RDONLY | os.O_CREAT, mode)
    try:
        with suppress(PermissionError):  # somebody else was faster
            files.fchmod(lock.fileno(), mode)
    except BaseException:
        lock.close()
        raise
    return lock


def _open_root(files: FileOperations, path: str) -> Descriptor:
    try:
        return open_descriptor(files, path, _READ_FOLDER)
    except NotADirectoryError as failure:
        raise RootRefusedError(path, "it is not a folder") from failure


def _make_folders(files: FileOperations, path: str, mode: int) -> None:
    """``path`` and what is missing above it; folders above are the user's alone."""
    if os.path.lexists(path):
        return
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_folders(files, parent, 0o700)
    _make_folder(files, path, mode)


def _sync_above(files: FileOperations, path: str) -> None:
    """Bring the way to ``path`` to the disk, whoever made it: he may have died before he could."""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
        with suppress(PermissionError):  # not to be read by this user, who did not make it then
            sync_folder(files, path)


def _make_folder(files: FileOperations, path: str, mode: int) -> None:
    with suppress(FileExistsError):
        files.mkdir(path, mode)
        with open_descriptor(files, path, _READ_FOLDER) as folder:
            files.fchmod(folder.fileno(), mode)


def _check_trust(path: str, status: os.stat_result, mode: int) -> None:
    reason = why_not_trusted(status, mode)
    if reason is not None:
        raise RootRefusedError(path, reason)


def _check_locks(files: FileOperations, paths: StorePaths, options: StoreOptions) -> None:
    """See two openings of one file exclude each other; on some filesystems a lock succeeds for everyone."""
    path = paths.own_lock("check")
    with (
        open_lock_file(files, path, options.file_mode) as first,
        open_lock_file(files, path, options.file_mode) as second,
    ):
        # several processes may check at once: a shared lock is there for all of them, and excludes the other kind
        if try_lock(files, first, exclusive=False) and try_lock(files, second, exclusive=True):
            raise LockFailedError(path, "two openings of it could lock it at once: locks do not lock here")


def _check_format(files: FileOperations, paths: StorePaths, options: StoreOptions) -> None:
    if not os.path.lexists(paths.format_file):
        write_file(files, paths, paths.format_file, canonical_json(_FORMAT), options.file_mode)
    with open_descriptor(files, paths.format_file, os.O_RDONLY) as file:
        data = os.pread(file.fileno(), 4096, 0)
    try:
        found = load_object(data)
    except StrictJSONError as failure:
        raise StoreFormatError(paths.format_file, f"it is not what a store begins with ({failure})") from failure
    if found != _FORMAT:
        raise StoreFormatError(paths.format_file, f"the store's format is {found}, this version's is {_FORMAT}")
