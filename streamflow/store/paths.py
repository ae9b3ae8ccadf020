"""Where everything lies in a store's folder. Pure: no torch.

::

    ROOT/store.json                                 the format
         entries/<content id>/g<generation>/        manifest.json, weights-00001.safetensors, ..., lease
         sources/<source id>.json                   which content a source gives
         digests/<digest of the path>.json          digests of source files
         locks/<identity>.lock                      publication locks, never removed
         quarantine/<content id>.g<generation>.*    damaged generations
         denied/<content id>.g<generation>          damaged generations that could not be moved
         tmp/                                       unfinished things; each is locked by who works on it
"""

from __future__ import annotations

import os
import re

import attrs

from streamflow.store.errors import InvalidIdentityError

FOLDERS = ("entries", "sources", "digests", "locks", "quarantine", "denied", "tmp")
#: Locks of the store itself: no identity begins with this.
OWN_LOCK_PREFIX = "@"
_CONTENT_ID = re.compile(r"[0-9a-f]{64}")
_IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_GENERATION = re.compile(r"g([1-9][0-9]{0,8})")
_NUMBERED = re.compile(r"([0-9a-f]{64})\.g([1-9][0-9]{0,8})(?:\..*)?")


@attrs.frozen
class StorePaths:
    """The paths of one store; ``root`` is absolute."""

    root: str

    @property
    def format_file(self) -> str:
        return os.path.join(self.root, "store.json")

    def folder(self, name: str) -> str:
        return os.path.join(self.root, name)

    def entry(self, content_id: str) -> str:
        """:raises InvalidIdentityError: if it is no content id."""
        return os.path.join(self.root, "entries", check_content_id(content_id))

    def generation(self, content_id: str, generation: int) -> str:
        """:raises InvalidIdentityError: if it is no content id."""
        return os.path.join(self.entry(content_id), f"g{generation}")

    def source(self, source_id: str) -> str:
        """:raises InvalidIdentityError: if it is no identity."""
        return os.path.join(self.root, "sources", f"{check_identity(source_id)}.json")

    def digest(self, key: str) -> str:
        return os.path.join(self.root, "digests", f"{key}.json")

    def publication_lock(self, identity: str) -> str:
        """:raises InvalidIdentityError: if it is no identity."""
        return os.path.join(self.root, "locks", f"{check_identity(identity)}.lock")

    def own_lock(self, name: str) -> str:
        return os.path.join(self.root, "locks", f"{OWN_LOCK_PREFIX}{name}.lock")

    def quarantined(self, content_id: str, generation: int, token: str) -> str:
        return os.path.join(self.root, "quarantine", f"{check_content_id(content_id)}.g{generation}.{token}")

    def denied(self, content_id: str, generation: int) -> str:
        return os.path.join(self.root, "denied", f"{check_content_id(content_id)}.g{generation}")


def check_content_id(text: str) -> str:
    """``text``, which is a content id.

    :raises InvalidIdentityError: if it is not.
    """
    if not _CONTENT_ID.fullmatch(text):
        raise InvalidIdentityError("content id", text, "it must be 64 hexadecimal digits")
    return text


def check_identity(text: str) -> str:
    """``text``, which can be a file name on its own.

    :raises InvalidIdentityError: if it cannot.
    """
    if not _IDENTITY.fullmatch(text):
        rule = "it must be 1 to 200 letters, digits, '.', '_' or '-', and begin with a letter or digit"
        raise InvalidIdentityError("identity", text, rule)
    return text


def is_content_id(text: str) -> bool:
    """Whether ``text`` has the form of a content id."""
    return _CONTENT_ID.fullmatch(text) is not None


def generation_of(name: str) -> int | None:
    """The number in the name of a generation's folder; None: it is something else."""
    found = _GENERATION.fullmatch(name)
    return int(found[1]) if found else None


def numbered(name: str) -> tuple[str, int] | None:
    """Content id and generation in the name of a quarantined or denied one; None: it is something else."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else None
