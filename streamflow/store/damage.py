"""What can be wrong with a stored entry, and which verification detects it when. Pure: no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from streamflow.store.options import Verification


class Damage(StrEnum):
    """One kind of damage to the files of an entry."""

    MANIFEST = "manifest changed"
    MISSING = "file missing"
    EXTRA = "file too many"
    TRUNCATED = "file truncated"
    SWAPPED = "files swapped"
    SYMLINK = "symlink in place of a file"
    TRAVERSAL = "name that leads out of the entry"
    HEADER = "header changed"
    PAYLOAD = "image changed"
    PADDING = "padding between images changed"
    WRITABLE = "writable by others"


class DamagedEntryError(ValueError):
    """Part of an entry is not as it was published. It never leaves the store, which makes a rejection of it."""

    def __init__(self, damage: Damage, reason: str) -> None:
        self.damage, self.reason = damage, reason
        super().__init__(f"{damage}: {reason}")


#: When damage is noticed: before a lease is handed out; by the task that verifies after opening; not at all.
Notice = Literal["at leasing", "after opening", "never"]

_BY_DIGESTS: dict[Verification, Notice] = {"size": "never", "background": "after opening", "digest": "at leasing"}
_AT_LEASING: dict[Verification, Notice] = {"size": "at leasing", "background": "at leasing", "digest": "at leasing"}

#: For each kind of damage and each verification level, when the damage is noticed.
DETECTION: dict[Damage, dict[Verification, Notice]] = {
    Damage.MANIFEST: _AT_LEASING,
    Damage.MISSING: _AT_LEASING,
    Damage.EXTRA: _AT_LEASING,
    Damage.TRUNCATED: _AT_LEASING,
    Damage.SWAPPED: _AT_LEASING,
    Damage.SYMLINK: _AT_LEASING,
    Damage.TRAVERSAL: _AT_LEASING,
    Damage.HEADER: _AT_LEASING,
    Damage.PAYLOAD: _BY_DIGESTS,
    Damage.PADDING: _BY_DIGESTS,
    Damage.WRITABLE: _AT_LEASING,
}
