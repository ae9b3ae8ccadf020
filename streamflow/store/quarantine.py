"""Take a damaged generation out of use: move it aside, or, where that is not allowed, mark it for good."""

from __future__ import annotations

import os
import secrets
import stat
import time
from contextlib import suppress

from streamflow.store.records import write_record
from streamflow.store.root import StoreRoot
from streamflow.store.temporaries import make_writable, sync_folder

QUARANTINED = "quarantined"
DENIED = "denied"
DENIED_HERE = "denied by this process"
GONE = "gone"


class Quarantine:
    """Takes generations out of use for one store, and remembers those that it could not even mark."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root
        self._denied_here: set[tuple[str, int]] = set()

    def is_denied(self, content_id: str, generation: int) -> bool:
        """Whether this generation must not be used. Blocks."""
        marker = self._root.paths.denied(content_id, generation)
        return (content_id, generation) in self._denied_here or os.path.lexists(marker)

    def denied_here(self, content_id: str) -> list[int]:
        """Generations of this entry that only this process knows to be unusable."""
        return [generation for found, generation in self._denied_here if found == content_id]

    def take(self, content_id: str, generation: int, reason: str) -> str:
        """Take the generation out of use, whatever user it belongs to; what was done. Blocks. Leases of it live on.

        ``gone``: somebody else has moved or removed it before.
        """
        path = self._root.paths.generation(content_id, generation)
        if not os.path.lexists(path):
            return GONE
        try:
            self._move(path, content_id, generation, reason)
        except FileNotFoundError:
            return GONE
        except OSError as failure:
            return self._deny(content_id, generation, f"{reason}; it could not be moved: {failure}")
        return QUARANTINED

    def _move(self, path: str, content_id: str, generation: int, reason: str) -> None:
        root = self._root
        target = root.paths.quarantined(content_id, generation, secrets.token_hex(4))
        if stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode):
            make_writable(root.files, path)  # a folder that is moved is written to: its ".." changes
        root.files.rename(path, target)
        with suppress(OSError):  # the damaged generation is out of use, which is what matters
            sync_folder(root.files, os.path.dirname(path))
            sync_folder(root.files, os.path.dirname(target))
            write_record(root, f"{target}.json", _report(reason))

    def _deny(self, content_id: str, generation: int, reason: str) -> str:
        try:
            write_record(self._root, self._root.paths.denied(content_id, generation), _report(reason))
        except OSError:
            self._denied_here.add((content_id, generation))
            return DENIED_HERE
        return DENIED


def _report(reason: str) -> dict[str, object]:
    return {"reason": reason, "time_s": int(time.time()), "uid": os.geteuid()}
