"""Which content each source gave: one record per source, written once its entry is there."""

from __future__ import annotations

import os
from collections.abc import Iterable

from streamflow.store.errors import IdentityCollisionError
from streamflow.store.paths import is_content_id
from streamflow.store.records import read_record, write_record
from streamflow.store.root import StoreRoot
from streamflow.store.temporaries import sync_folder

_SUFFIX = ".json"


def read_source(root: StoreRoot, source_id: str) -> str | None:
    """The content that this source is known to give; None: not known. Blocks."""
    record = read_record(root, root.paths.source(source_id))
    if record is None or record.keys() != {"source_id", "content_id"} or record["source_id"] != source_id:
        return None
    content_id = record["content_id"]
    return content_id if isinstance(content_id, str) and is_content_id(content_id) else None


def check_source(root: StoreRoot, source_id: str, content_id: str) -> None:
    """Nothing, unless the source is known to give another content. Blocks.

    :raises IdentityCollisionError: if it is.
    """
    known = read_source(root, source_id)
    if known is not None and known != content_id:
        raise IdentityCollisionError(source_id, known, content_id)


def write_source(root: StoreRoot, source_id: str, content_id: str) -> None:
    """Remember, lastingly, what the source gives. Blocks; for the holder of the records' lock.

    :raises IdentityCollisionError: if it is known to give another content.
    """
    check_source(root, source_id, content_id)
    if read_source(root, source_id) is None:
        record = {"source_id": source_id, "content_id": content_id}
        write_record(root, root.paths.source(source_id), record)
    else:  # who wrote it may have died before its name was on the disk
        sync_folder(root.files, root.paths.folder("sources"))


def sources_of(root: StoreRoot) -> dict[str, list[str]]:
    """The sources of each content. Blocks."""
    found: dict[str, list[str]] = {}
    for name in sorted(os.listdir(root.paths.folder("sources"))):
        source_id = name.removesuffix(_SUFFIX)
        content_id = read_source(root, source_id) if name.endswith(_SUFFIX) else None
        if content_id is not None:
            found.setdefault(content_id, []).append(source_id)
    return found


def forget_sources(root: StoreRoot, source_ids: Iterable[str]) -> None:
    """Remove the records of these sources. Blocks; for the holder of the records' lock."""
    for source_id in source_ids:
        root.files.unlink(root.paths.source(source_id))
