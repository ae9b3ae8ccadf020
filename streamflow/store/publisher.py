"""Publish a draft under the lock of its content: once for all who publish the same."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial

from streamflow.store.access import StoreAccess
from streamflow.store.draft import Draft
from streamflow.store.errors import ContentChangedError, EntryGoneError, EntryRejectedError
from streamflow.store.hashing import Progress
from streamflow.store.lease import Lease
from streamflow.store.locks import Patience
from streamflow.store.packing import EntryPlan
from streamflow.store.publication import Published, Written, give_name, plan_draft, sync_names, write_aside
from streamflow.store.sources import check_source, write_source


class Publisher:
    """One publication of one draft into an open store: the entry, and a lease of it for the caller to close."""

    def __init__(self, access: StoreAccess, draft: Draft, source_id: str | None, progress: Progress | None) -> None:
        self._access, self._draft, self._source_id, self._progress = access, draft, source_id, progress

    async def publish(self) -> tuple[Published, Lease]:
        """Write first: only then is it known what the content is, and whose lock to take."""
        plan = await self._plan()
        with ExitStack() as undo:
            async with (
                self._write_aside(plan) as written,
                self._access.publication_lock(written.content_id),
            ):
                found = await self._install(written, undo)
            undo.pop_all()
        return found

    async def publish_known(self, content_id: str) -> tuple[Published, Lease]:
        """Take the lock first: what others have published meanwhile is not written again."""
        plan = await self._plan()
        with ExitStack() as undo:
            async with self._access.publication_lock(content_id):
                found = await self._find(content_id, undo)
                if found is None:
                    async with self._write_aside(plan) as written:
                        if written.content_id != content_id:
                            raise ContentChangedError(content_id, written.content_id)
                        found = await self._install(written, undo)
            undo.pop_all()
        return found

    async def _plan(self) -> EntryPlan:
        work = partial(plan_draft, self._draft, self._source_id, self._access.options.max_file_bytes)
        return await self._access.call("planning an entry", work)

    def _write_aside(self, plan: EntryPlan) -> AbstractAsyncContextManager[Written]:
        return write_aside(self._access.root, self._access.crew, self._draft, plan, self._source_id, self._progress)

    async def _install(self, written: Written, undo: ExitStack) -> tuple[Published, Lease]:
        """Give what was written its name, unless its content is there. For the holder of the publication lock.

        ``undo`` closes the lease.
        """
        present = await self._find(written.content_id, undo)
        if present is not None:
            return present
        await self._check_source(written.content_id)
        denied = self._access.quarantine.denied_here(written.content_id)
        naming = partial(give_name, self._access.root, written, denied)
        generation = await self._access.call("publishing an entry", naming)
        await self._remember(written.content_id)
        lease = await self._access.lease(written.content_id)
        if lease is None:
            raise EntryGoneError(written.content_id, generation)
        undo.enter_context(lease)
        return Published(written.content_id, generation, was_present=False), lease

    async def _find(self, content_id: str, undo: ExitStack) -> tuple[Published, Lease] | None:
        """The entry, if it is there and sound; a damaged one is taken out of use. For the holder of its lock."""
        try:
            lease = await self._access.lease(content_id)
        except EntryRejectedError:
            return None
        if lease is None:
            return None
        undo.enter_context(lease)
        await self._access.call("publishing an entry", partial(sync_names, self._access.root, content_id))
        await self._remember(content_id)
        return Published(content_id, lease.generation, was_present=True), lease

    async def _check_source(self, content_id: str) -> None:
        if self._source_id is not None:
            work = partial(check_source, self._access.root, self._source_id, content_id)
            await self._access.call("reading a source", work)

    async def _remember(self, content_id: str) -> None:
        if self._source_id is None:
            return
        patience = Patience("remembering a source", self._access.options.lock_wait_s, "lock_wait_s")
        async with self._access.lock(self._access.root.paths.own_lock("sources"), patience):
            work = partial(write_source, self._access.root, self._source_id, content_id)
            await self._access.call("remembering a source", work)
