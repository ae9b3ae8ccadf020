"""Small JSON files of the store: written in one step, and read without trust."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from streamflow.canonical_json import canonical_json
from streamflow.store.descriptors import open_descriptor
from streamflow.store.root import StoreRoot
from streamflow.store.temporaries import write_file
from streamflow.store.trust import why_not_trusted
from streamflow.weights.strict_json import StrictJSONError, load_object

_MAX_BYTES = 64 << 10


def read_record(root: StoreRoot, path: str) -> dict[str, Any] | None:
    """The object in the file at ``path``; None: there is none, or it is damaged, or might be somebody else's work."""
    try:
        with open_descriptor(root.files, path, os.O_RDONLY | os.O_NONBLOCK) as file:
            if why_not_trusted(os.fstat(file.fileno()), root.options.file_mode) is not None:
                return None
            return load_object(os.pread(file.fileno(), _MAX_BYTES, 0))
    except (FileNotFoundError, StrictJSONError):
        return None


def write_record(root: StoreRoot, path: str, record: Mapping[str, Any]) -> None:
    """Put ``record`` at ``path``, whole and lastingly."""
    write_file(root.files, root.paths, path, canonical_json(record), root.options.file_mode)
