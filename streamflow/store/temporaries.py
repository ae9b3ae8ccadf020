"""Unfinished files and folders: each is locked by the one that works on it, and removed by the next to get that lock.

Who gets the lock of a temporary knows that its owner has died: nothing of a living process is ever removed, and nothing
of a dead one stays for longer than until the next publication.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import attrs

from streamflow.store.descriptors import Descriptor, open_descriptor
from streamflow.store.files import FileOperations
from streamflow.store.locks import still_names, try_lock
from streamflow.store.paths import StorePaths

_READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY


@attrs.frozen
class Temporary:
    """A file or folder in ``tmp/`` that belongs to this process while ``descriptor`` is open."""

    path: str
    descriptor: Descriptor


def make_folder(files: FileOperations, paths: StorePaths, mode: int) -> Temporary:
    """A new folder in ``tmp/``; its owner moves it away or removes it, and closes it.

    ``mode`` is the store's own: whoever may clean up after a dead owner needs the right to.
    """
    while True:
        path = new_path(paths)
        files.mkdir(path, mode)
        with suppress(FileNotFoundError):  # removed already, as stale
            temporary = _claim(files, path, _READ_FOLDER, mode)
            if temporary is not None:
                return temporary


def make_file(files: FileOperations, paths: StorePaths, mode: int) -> Temporary:
    """A new file in ``tmp/``; else as `make_folder`."""
    while True:
        temporary = _claim(files, new_path(paths), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        if temporary is not None:
            return temporary


def new_path(paths: StorePaths) -> str:
    """A name in ``tmp/`` that nothing has."""
    return os.path.join(paths.folder("tmp"), secrets.token_hex(8))


def write_file(files: FileOperations, paths: StorePaths, target: str, data: bytes, mode: int) -> None:
    """Put a file with these bytes at ``target``, whole, in one step, and lastingly."""
    temporary = make_file(files, paths, mode)
    with temporary.descriptor:
        try:
            write_fully(files, temporary.descriptor.fileno(), memoryview(data), 0)
            files.fsync(temporary.descriptor.fileno())
            files.rename(temporary.path, target)
        except BaseException:
            with suppress(OSError):
                files.unlink(temporary.path)
            raise
    sync_folder(files, os.path.dirname(target))


def write_fully(files: FileOperations, fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    done = 0
    while done < data.nbytes:
        done += files.pwrite(fd, data[done:], offset + done)


def sync_folder(files: FileOperations, path: str) -> None:
    """Bring the names in a folder to the disk."""
    with open_descriptor(files, path, _READ_FOLDER) as folder:
        files.fsync(folder.fileno())


def remove_stale(files: FileOperations, paths: StorePaths) -> None:
    """Remove every temporary whose owner has died, as far as this user may."""
    folder = paths.folder("tmp")
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with suppress(OSError), _opened_if_stale(files, path):
            remove_tree(files, path)


def remove_tree(files: FileOperations, path: str) -> None:
    """Remove a file, or a folder with all that is in it, read-only ones too. What is gone already is fine."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode):
            files.unlink(path)
            return
        make_writable(files, path)
        for name in os.listdir(path):
            remove_tree(files, os.path.join(path, name))
        files.rmdir(path)


def make_writable(files: FileOperations, path: str) -> None:
    """Let the owner change a hardened folder; one that belongs to somebody else stays as it is."""
    with open_descriptor(files, path, _READ_FOLDER) as folder:
        status = os.fstat(folder.fileno())
        if status.st_uid == os.geteuid() and status.st_mode & 0o700 != 0o700:
            files.fchmod(folder.fileno(), stat.S_IMODE(status.st_mode) | 0o700)


@contextmanager
def _opened_if_stale(files: FileOperations, path: str) -> Iterator[None]:
    with open_descriptor(files, path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
        if not try_lock(files, descriptor, exclusive=True):
            raise BlockingIOError(f"{path} is being worked on")
        yield


def _claim(files: FileOperations, path: str, flags: int, mode: int) -> Temporary | None:
    """The new temporary, locked; None: somebody who looked for stale ones took it before it was locked."""
    descriptor = open_descriptor(files, path, flags, mode)
    try:
        if try_lock(files, descriptor, exclusive=True) and still_names(path, descriptor):
            files.fchmod(descriptor.fileno(), mode)  # whatever the umask is
            return Temporary(path, descriptor)
    except BaseException:
        with descriptor, suppress(OSError):
            remove_tree(files, path)
        raise
    descriptor.close()
    return None
