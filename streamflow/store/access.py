"""What every operation of an open store goes through: the worker threads, the locks, leases and their rejection."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

from streamflow.stages.threads import ThreadCrew
from streamflow.store.damage import DamagedEntryError
from streamflow.store.errors import EntryRejectedError, StoreClosedError, StoreForkedError, disk_errors
from streamflow.store.generations import generations
from streamflow.store.hashing import Progress
from streamflow.store.lease import Lease
from streamflow.store.leasing import GenerationBusyError, GenerationGoneError, open_generation
from streamflow.store.locks import Patience, wait_for_lock
from streamflow.store.paths import check_content_id
from streamflow.store.quarantine import Quarantine
from streamflow.store.root import StoreRoot, open_lock_file
from streamflow.store.verification import verify_bytes

Result = TypeVar("Result")


class _Closable(Protocol):
    def close(self) -> None: ...


class StoreAccess:
    """An open store as seen by its own operations; the public ones, and their errors, are `HostWeightStore`'s."""

    def __init__(self, root: StoreRoot, crew: ThreadCrew) -> None:
        self.root, self.crew = root, crew
        self.options = root.options
        self.quarantine = Quarantine(root)
        self._pid = os.getpid()
        self.closed = False

    def check(self) -> None:
        """Nothing, if the store may be used.

        :raises StoreForkedError: in a forked child.
        :raises StoreClosedError: if it is closed.
        """
        if os.getpid() != self._pid:
            raise StoreForkedError(self.root.paths.root)
        if self.closed:
            raise StoreClosedError(self.root.paths.root)

    async def call(
        self, operation: str, work: Callable[[], Result], undo: Callable[[Result], object] | None = None
    ) -> Result:
        """What ``work`` returns, done on a worker thread; what the system refuses there is a typed error."""
        self.check()

        def run() -> Result:
            with disk_errors(operation, self.root.paths.root):
                return work()

        return await self.crew.call(run, undo=undo, name="store")

    @asynccontextmanager
    async def lock(self, path: str, patience: Patience) -> AsyncIterator[None]:
        """Hold the lock file at ``path`` for this task alone, among all processes."""
        work = partial(open_lock_file, self.root.files, path, self.options.file_mode)
        with await self.call("opening a lock", work, undo=_close) as lock:
            await wait_for_lock(self.root.files, lock, patience)
            yield

    @asynccontextmanager
    async def publication_lock(self, identity: str) -> AsyncIterator[None]:
        """Hold the publication of ``identity`` for this task alone, among all processes."""
        self.check()
        path = self.root.paths.publication_lock(identity)
        patience = Patience(f"publishing {identity}", self.options.publication_wait_s, "publication_wait_s")
        async with self.lock(path, patience):
            yield

    async def lease(self, content_id: str) -> Lease | None:
        """The newest usable generation, checked as the options say; None: a miss."""
        self.check()
        check_content_id(content_id)
        lease = await self._lease_patiently(content_id)
        if lease is not None and self.options.verification == "digest":
            try:
                await self.verify(lease, None)
            except BaseException:
                lease.close()
                raise
        return lease

    async def verify(self, lease: Lease, progress: Progress | None, num_threads: int | None = None) -> None:
        """Nothing, if every byte of the leased generation is as it was published; else it is out of use.

        ``num_threads``: how many threads hash; None: as many as the options say.
        """
        self.check()
        num_threads = self.options.effective_num_threads if num_threads is None else num_threads
        try:
            await verify_bytes(lease, self.crew, num_threads, progress)
        except DamagedEntryError as damage:
            work = partial(self._reject, lease.content_id, lease.generation, damage)
            raise await self.call("rejecting an entry", work) from damage

    async def _lease_patiently(self, content_id: str) -> Lease | None:
        patience = Patience(f"leasing the entry {content_id}", self.options.lock_wait_s, "lock_wait_s")
        while True:
            try:
                return await self.call("leasing an entry", partial(self._lease_newest, content_id), undo=_close)
            except GenerationBusyError as busy:
                await patience.pause(busy.path)

    def _lease_newest(self, content_id: str) -> Lease | None:
        """:raises GenerationBusyError: if it is being removed."""
        while (generation := self._newest(content_id)) is not None:
            try:
                return open_generation(self.root, content_id, generation)
            except GenerationGoneError:
                continue
            except DamagedEntryError as damage:
                raise self._reject(content_id, generation, damage) from damage
        return None

    def _newest(self, content_id: str) -> int | None:
        found = generations(self.root.paths, content_id)
        return next((number for number in found if not self.quarantine.is_denied(content_id, number)), None)

    def _reject(self, content_id: str, generation: int, damage: DamagedEntryError) -> EntryRejectedError:
        disposition = self.quarantine.take(content_id, generation, str(damage))
        return EntryRejectedError(content_id, generation, str(damage), disposition)


def _close(made: _Closable | None) -> None:
    if made is not None:
        made.close()
