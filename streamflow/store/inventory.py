"""What is in a store, for people and for eviction."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

import attrs

from streamflow.store.descriptors import open_descriptor
from streamflow.store.eviction_policy import Candidate
from streamflow.store.generations import content_ids, generations
from streamflow.store.locks import try_lock
from streamflow.store.manifest import LEASE_NAME, MANIFEST_NAME, Manifest
from streamflow.store.manifest_parsing import MAX_MANIFEST_BYTES, parse_manifest
from streamflow.store.manifest_values import ManifestError
from streamflow.store.quarantine import Quarantine
from streamflow.store.root import StoreRoot
from streamflow.store.sources import sources_of


@attrs.frozen
class EntryInfo:
    """One generation of an entry.

    Attributes:
        nbytes: what its files take.
        last_used_s: when it was last leased or published, from 1970, in seconds.
        is_leased: whether somebody used it at that moment, or was about to remove it.
        is_denied: whether it is damaged and could not be moved aside.
        source_ids: the sources that are known to give this content.
        manifest: what it says of itself; None: not readable as a manifest.
        problem: why not.
    """

    content_id: str
    generation: int
    nbytes: int
    last_used_s: float
    is_leased: bool
    is_denied: bool
    source_ids: tuple[str, ...]
    manifest: Manifest | None = attrs.field(repr=False)
    problem: str | None


def list_entries(root: StoreRoot, quarantine: Quarantine) -> tuple[EntryInfo, ...]:
    """Every generation that is in place, in order. Blocks; what is removed meanwhile is left out."""
    sources = sources_of(root)
    found = []
    for candidate in list_candidates(root, quarantine):
        path = root.paths.generation(candidate.content_id, candidate.generation)
        manifest, problem = _manifest(path, candidate.content_id)
        info = EntryInfo(
            candidate.content_id,
            candidate.generation,
            candidate.nbytes,
            candidate.last_used_s,
            _is_leased(root, path),
            candidate.is_denied,
            tuple(sources.get(candidate.content_id, ())),
            manifest,
            problem,
        )
        found.append(info)
    return tuple(found)


def list_candidates(root: StoreRoot, quarantine: Quarantine) -> list[Candidate]:
    """Every generation that is in place, as eviction sees it. Blocks."""
    found = []
    for content_id in content_ids(root.paths):
        for generation in sorted(generations(root.paths, content_id)):
            with suppress(FileNotFoundError):
                path = root.paths.generation(content_id, generation)
                denied = quarantine.is_denied(content_id, generation)
                found.append(Candidate(content_id, generation, folder_bytes(path), _last_used_s(path), denied))
    return found


def folder_bytes(path: str) -> int:
    """What the files in a folder take together, whatever they are."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        return os.lstat(path).st_size
    with os.scandir(path) as found:
        return sum(item.stat(follow_symlinks=False).st_size for item in found)


def _last_used_s(path: str) -> float:
    try:
        return os.lstat(os.path.join(path, LEASE_NAME)).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return os.lstat(path).st_mtime


def _is_leased(root: StoreRoot, path: str) -> bool:
    try:
        with open_descriptor(root.files, os.path.join(path, LEASE_NAME), os.O_RDONLY | os.O_NONBLOCK) as lease:
            return not try_lock(root.files, lease, exclusive=True)
    except OSError:
        return False


def _manifest(path: str, content_id: str) -> tuple[Manifest | None, str | None]:
    try:
        with open(os.path.join(path, MANIFEST_NAME), "rb") as file:
            return parse_manifest(file.read(MAX_MANIFEST_BYTES), content_id).manifest, None
    except (OSError, ManifestError) as failure:
        return None, str(failure)
