"""The host weight store: entries are published once, found by their identities, and leased by many processes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from streamflow.stages.threads import ThreadCrew
from streamflow.store.access import StoreAccess
from streamflow.store.content import content_id_of
from streamflow.store.draft import Draft
from streamflow.store.errors import disk_errors
from streamflow.store.eviction import Evicted, Eviction
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.files import FileOperations
from streamflow.store.filesystems import Filesystem
from streamflow.store.hashing import Progress, hash_images
from streamflow.store.inventory import EntryInfo, list_entries
from streamflow.store.lease import Lease
from streamflow.store.options import StoreOptions
from streamflow.store.publication import Published, plan_draft
from streamflow.store.publisher import Publisher
from streamflow.store.root import StoreRoot, prepare_root
from streamflow.store.source_digests import digest_of_source
from streamflow.store.sources import read_source

_FILES = FileOperations()


@asynccontextmanager
async def open_store(
    options: StoreOptions, crew: ThreadCrew, *, files: FileOperations = _FILES
) -> AsyncIterator[HostWeightStore]:
    """The store at ``options.root``, made where there is none; its folder, filesystem and locks are checked first.

    The store works on threads of ``crew``, which has to stay open longer. Leases do not end with the store.

    :raises RootRefusedError: if somebody who is not trusted could change its folder.
    :raises UnsupportedFilesystemError: if its folder is shared with other machines.
    :raises LockFailedError: if locks do not lock there.
    :raises StoreFormatError: if there is a store of another format.
    :raises StoreOperationError: if the system refuses what has to be done.
    """

    def prepare() -> StoreRoot:
        with disk_errors("opening the store", options.root):
            return prepare_root(files, options)

    access = StoreAccess(await crew.call(prepare, name="store"), crew)
    try:
        yield HostWeightStore(access)
    finally:
        access.closed = True


class HostWeightStore:
    """One process's way to a store. Made by `open_store`.

    Blocking work is done on worker threads, and locks are waited for by the loop. A cancelled call leaves nothing
    half-done behind. After closing, every call raises `StoreClosedError`, and in a forked child `StoreForkedError`.
    """

    def __init__(self, access: StoreAccess) -> None:
        self._access = access

    def __repr__(self) -> str:
        state = "closed" if self._access.closed else f"open, on {self.filesystem.kind}"
        return f"<HostWeightStore {self._access.root.paths.root!r} {state}>"

    @property
    def options(self) -> StoreOptions:
        return self._access.options

    @property
    def filesystem(self) -> Filesystem:
        """What the store lies on; on one that ``is_memory``, entries take host memory and a restart loses them."""
        return self._access.root.filesystem

    async def content_of(self, source_id: str) -> str | None:
        """The content that this source gives, as far as the store knows; None: a miss.

        :raises InvalidIdentityError: if it could not be an identity.
        :raises StoreOperationError: if the system refuses to read it.
        """
        return await self._access.call("reading a source", partial(read_source, self._access.root, source_id))

    async def lease(self, content_id: str) -> Lease | None:
        """The newest usable generation of this content, for the caller to close; None: a miss.

        It was checked as ``options.verification`` says; `streamflow.store.damage` has the table.

        :raises EntryRejectedError: if it is damaged; it is out of use then.
        :raises LockTimeoutError: if somebody is about to remove it for longer than ``lock_wait_s``.
        :raises InvalidIdentityError: if it is no content id.
        :raises StoreOperationError: if the system refuses to open it.
        """
        return await self._access.lease(content_id)

    def publication_lock(self, identity: str) -> AbstractAsyncContextManager[None]:
        """Holds the publication of ``identity`` for this task alone, among all processes of the node.

        Entering raises:

        :raises LockTimeoutError: if others hold it for longer than ``publication_wait_s``.
        :raises InvalidIdentityError: if it could not be an identity.
        """
        return self._access.publication_lock(identity)

    async def publish(
        self,
        draft: Draft,
        *,
        source_id: str | None,
        content_id: str | None = None,
        progress: Progress | None = None,
    ) -> Published:
        """The entry of this draft, published; else as `publish_leased`, without its lease."""
        published, lease = await self.publish_leased(
            draft, source_id=source_id, content_id=content_id, progress=progress
        )
        lease.close()
        return published

    async def publish_leased(
        self,
        draft: Draft,
        *,
        source_id: str | None,
        content_id: str | None = None,
        progress: Progress | None = None,
    ) -> tuple[Published, Lease]:
        """The entry of this draft: written, or found. Its bytes are read once, and are on the disk when this returns.
        The lease is as of `lease`, for the caller to close; from its first moment on the entry is in use, so that no
        eviction comes between.

        ``content_id`` is what `content_id` has said of this draft, if it was asked: who publishes the same then waits
        and finds it, instead of writing it too. It must not be given by who holds the publication lock of that id.
        Cancelled: stops at the next chunk, removes what it wrote and gives its locks back.

        :raises IdentityCollisionError: if the source is known to give another content; nothing is published then.
        :raises ContentChangedError: if the draft's content is not ``content_id``.
        :raises InsufficientDiskError: if there is no room, before or during the writing.
        :raises LockTimeoutError: if others publish the same content for longer than ``publication_wait_s``.
        :raises DraftError: if the draft contradicts itself.
        :raises UnsupportedTensorError: if a tensor cannot be stored.
        :raises StoreOperationError: if the system refuses to write.
        :raises EntryRejectedError: if it is damaged again already; it is out of use then.
        :raises EntryGoneError: if it was taken away although it was in use.
        """
        publisher = Publisher(self._access, draft, source_id, progress)
        return await (publisher.publish() if content_id is None else publisher.publish_known(content_id))

    async def content_id(self, draft: Draft, progress: Progress | None = None) -> str:
        """The identity of this draft's content. Reads and hashes every byte; writes nothing.

        :raises DraftError: if the draft contradicts itself.
        :raises UnsupportedTensorError: if a tensor cannot be stored.
        """
        planning = partial(plan_draft, draft, None, self.options.max_file_bytes)
        await self._access.call("planning an entry", planning)
        sizes = [image.nbytes for image in draft.images]
        num_threads = self.options.effective_num_threads
        digests = await hash_images(sizes, draft.read, self._access.crew, num_threads, progress=progress)
        return content_id_of(draft.images, digests)

    async def verify(self, lease: Lease, progress: Progress | None = None, *, num_threads: int | None = None) -> None:
        """Nothing, if every byte of the leased generation is as it was published. Cancellable between chunks.

        ``num_threads``: how many threads hash; None: as many as the options say.

        :raises EntryRejectedError: if one is not; the generation is out of use then, the lease stays open.
        """
        await self._access.verify(lease, progress, num_threads)

    async def quarantine(self, content_id: str, generation: int, reason: str) -> None:
        """Take a generation out of use: moved aside, or marked where that is not allowed. Leases of it live on.

        :raises InvalidIdentityError: if it is no content id.
        """
        await self._access.call("quarantine", partial(self._access.quarantine.take, content_id, generation, reason))

    async def entries(self) -> tuple[EntryInfo, ...]:
        """Everything that is stored, unusable generations among it.

        :raises StoreOperationError: if the system refuses to list it.
        """
        return await self._access.call("listing", partial(list_entries, self._access.root, self._access.quarantine))

    async def evict(self, policy: EvictionPolicy) -> tuple[Evicted, ...]:
        """Remove what the policy does not let stay and nobody uses; what was removed. Cancellable between entries.

        :raises StoreOperationError: if the system refuses to list the entries; one that cannot be removed is left.
        """
        beginning = partial(Eviction, self._access.root, self._access.quarantine, policy)
        eviction = await self._access.call("eviction", beginning)
        evicted: list[Evicted] = []
        while (removed := await self._access.call("eviction", eviction.step)) is not None:
            evicted.append(removed)
        return tuple(evicted)

    async def source_digest(self, path: str | os.PathLike[str], opened: os.stat_result | None = None) -> str:
        """The SHA-256 of a source file; remembered while path, inode, size and times stay the same.

        ``opened``: the status of the file that somebody opened at this path, to read what the digest is to be of.

        :raises SourceChangedError: if it changed while it was hashed, or is not the file that was opened.
        :raises SourceReadError: if it cannot be read.
        :raises StoreOperationError: if it cannot be opened.
        """
        self._access.check()
        return await digest_of_source(self._access.root, os.fspath(path), self._access.crew, opened)
