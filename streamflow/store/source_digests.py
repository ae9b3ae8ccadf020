"""Digests of source files, remembered while nothing about a file has changed."""

from __future__ import annotations

import errno
import os
import time
from functools import partial
from typing import Any

from streamflow.stages.threads import ThreadCrew
from streamflow.store.content import sha256
from streamflow.store.descriptors import Descriptor, open_descriptor
from streamflow.store.errors import SourceChangedError, StoreOperationError, disk_errors
from streamflow.store.hashing import hash_file
from streamflow.store.records import read_record, write_record
from streamflow.store.root import StoreRoot
from streamflow.weights.file_reading import read_fully

#: A file whose inode changed this recently may change again without its times showing it: clocks tick coarsely.
SETTLE_S = 2.0
#: What the system says where this process may read a store and not write to it.
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


async def digest_of_source(root: StoreRoot, path: str, crew: ThreadCrew, opened: os.stat_result | None = None) -> str:
    """The SHA-256 of a file, from the cache where path, inode, size and times are those that were hashed.

    ``opened``: the status of a file that was opened at this path before, which has to be the one that is there now.

    :raises SourceChangedError: if the file changed while it was hashed, or is not the one that was opened.
    :raises StoreOperationError: if it cannot be opened.
    :raises SourceReadError: if it cannot be read.
    """
    file = await crew.call(partial(_open, root, path), undo=Descriptor.close, name="source digest")
    try:
        before = await crew.call(partial(_key, file), name="source digest")
        if opened is not None and before != _key_of(file.path, opened):
            raise SourceChangedError(file.path)
        known = await crew.call(partial(_recall, root, before), name="source digest")
        if known is not None:
            return known
        began_s = time.time()
        digest = await hash_file(partial(_read, file, before["size"]), before["size"], crew)
        if await crew.call(partial(_key, file), name="source digest") != before:
            raise SourceChangedError(file.path)
        if before["ctime_ns"] / 1e9 <= began_s - SETTLE_S:
            await crew.call(partial(_remember, root, before, digest), name="source digest")
        return digest
    finally:
        file.close()


def _open(root: StoreRoot, path: str) -> Descriptor:
    with disk_errors("opening a source file", path):
        path = os.path.realpath(path)
        return open_descriptor(root.files, path, os.O_RDONLY | os.O_NONBLOCK)


def _key(file: Descriptor) -> dict[str, Any]:
    """All that can be known of the file without reading it; ctime cannot be set by anybody."""
    return _key_of(file.path, os.fstat(file.fileno()))


def _key_of(path: str, status: os.stat_result) -> dict[str, Any]:
    return {
        "path": path,
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _read(file: Descriptor, file_bytes: int, target: memoryview, start: int) -> None:
    read_fully(file.fileno(), target, start, file.path, file_bytes)


def _recall(root: StoreRoot, key: dict[str, Any]) -> str | None:
    with disk_errors("reading a source digest", root.paths.root):
        record = read_record(root, _place(root, key))
    if record is None or record.keys() != {*key, "sha256"} or not isinstance(record["sha256"], str):
        return None
    return record["sha256"] if {**key, "sha256": record["sha256"]} == record else None


def _remember(root: StoreRoot, key: dict[str, Any], digest: str) -> None:
    """Keep the digest for others, unless the store is for reading only: then it is computed anew each time."""
    try:
        with disk_errors("keeping a source digest", root.paths.root):
            write_record(root, _place(root, key), {**key, "sha256": digest})
    except StoreOperationError as failure:
        if failure.number not in _READ_ONLY:
            raise


def _place(root: StoreRoot, key: dict[str, Any]) -> str:
    return root.paths.digest(sha256(os.fsencode(key["path"])))
