"""Remove generations that nobody uses: their locks are taken without waiting, and what is in use is skipped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import attrs

from streamflow.store.descriptors import open_descriptor
from streamflow.store.eviction_policy import Candidate, EvictionPolicy, eviction_order, why_evicted
from streamflow.store.generations import content_ids, generations
from streamflow.store.inventory import folder_bytes, list_candidates
from streamflow.store.locks import still_names, try_lock
from streamflow.store.manifest import LEASE_NAME
from streamflow.store.paths import numbered
from streamflow.store.quarantine import Quarantine
from streamflow.store.root import StoreRoot, open_lock_file
from streamflow.store.sources import forget_sources, sources_of
from streamflow.store.temporaries import make_writable, new_path, remove_tree, sync_folder


@attrs.frozen
class Evicted:
    """A generation that was removed, how many bytes it took, and why it had to go."""

    content_id: str
    generation: int
    nbytes: int
    reason: str


class _InUseError(Exception):
    """Somebody uses, publishes or removes this."""


class Eviction:
    """One round of eviction; `step` removes one generation at most. Blocks; for one thread at a time."""

    def __init__(self, root: StoreRoot, quarantine: Quarantine, policy: EvictionPolicy) -> None:
        self._root, self._policy = root, policy
        candidates = list_candidates(root, quarantine)
        self._total_bytes = sum(found.nbytes for found in candidates)
        self._left = iter(eviction_order(candidates))
        self._quarantined = iter(sorted(os.listdir(root.paths.folder("quarantine"))))
        self._now_s = time.time()

    def step(self) -> Evicted | None:
        """What was removed; None: nothing is left to remove."""
        for name in self._quarantined:
            with suppress(_InUseError, OSError):
                return self._remove_quarantined(name)
        for candidate in self._left:
            reason = why_evicted(candidate, self._total_bytes, self._now_s, self._policy)
            if reason is not None:
                with suppress(_InUseError, OSError):
                    self._remove(candidate)
                    self._total_bytes -= candidate.nbytes
                    return Evicted(candidate.content_id, candidate.generation, candidate.nbytes, reason)
        self._remove_empty_folders()
        return None

    def _remove(self, candidate: Candidate) -> None:
        paths = self._root.paths
        path = paths.generation(candidate.content_id, candidate.generation)
        with self._locked(paths.publication_lock(candidate.content_id)), self._unused(path):
            if generations(paths, candidate.content_id) == [candidate.generation]:
                self._forget(candidate.content_id)
            self._take_away(path)
        with suppress(FileNotFoundError):
            self._root.files.unlink(paths.denied(candidate.content_id, candidate.generation))

    def _remove_quarantined(self, name: str) -> Evicted:
        path = os.path.join(self._root.paths.folder("quarantine"), name)
        found = numbered(name)
        if found is None or not os.path.isdir(path):
            raise _InUseError  # the report of one, which goes with it
        nbytes = folder_bytes(path)
        with self._unused(path):
            self._take_away(path)
        with suppress(FileNotFoundError):
            self._root.files.unlink(f"{path}.json")
        return Evicted(*found, nbytes, "damaged")

    def _remove_empty_folders(self) -> None:
        """Those of entries without a generation."""
        for content_id in content_ids(self._root.paths):
            # an OSError: a generation is there, or was published just now
            with suppress(_InUseError, OSError), self._locked(self._root.paths.publication_lock(content_id)):
                self._root.files.rmdir(self._root.paths.entry(content_id))

    def _forget(self, content_id: str) -> None:
        """The sources go first: one that leads to nothing would do no harm, but stay for ever."""
        with self._locked(self._root.paths.own_lock("sources")):
            forget_sources(self._root, sources_of(self._root).get(content_id, ()))

    def _take_away(self, path: str) -> None:
        """First out of sight, lastingly, then removed: no crash leaves half a generation in its place."""
        files, target = self._root.files, new_path(self._root.paths)
        make_writable(files, path)
        files.rename(path, target)
        sync_folder(files, os.path.dirname(path))
        sync_folder(files, os.path.dirname(target))
        remove_tree(files, target)

    @contextmanager
    def _locked(self, path: str) -> Iterator[None]:
        with open_lock_file(self._root.files, path, self._root.options.file_mode) as lock:
            if not try_lock(self._root.files, lock, exclusive=True):
                raise _InUseError
            yield

    @contextmanager
    def _unused(self, path: str) -> Iterator[None]:
        """Nobody leases the generation at ``path``, nor will before the end; damaged ones may have nothing to lock."""
        try:
            lease = open_descriptor(self._root.files, os.path.join(path, LEASE_NAME), os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            yield
            return
        with lease:
            if not try_lock(self._root.files, lease, exclusive=True) or not still_names(lease.path, lease):
                raise _InUseError
            yield
