"""Bring a draft into the store: written aside, then given its name in one step."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import attrs

from streamflow._version import __version__
from streamflow.stages.threads import ThreadCrew
from streamflow.store.draft import Draft
from streamflow.store.draft_rules import check_images, check_metadata
from streamflow.store.generations import next_generation
from streamflow.store.hashing import Progress, hash_images
from streamflow.store.manifest import make_manifest, manifest_bytes
from streamflow.store.packing import EntryPlan, plan_entry
from streamflow.store.paths import check_identity
from streamflow.store.root import StoreRoot, prepare_folder
from streamflow.store.temporaries import sync_folder
from streamflow.store.writing import EntryWriter


@attrs.frozen
class Published:
    """Where a draft is now. ``was_present``: its content had been published before, and was found sound."""

    content_id: str
    generation: int
    was_present: bool


@attrs.frozen
class Written:
    """An entry that is complete on the disk, but has no name yet."""

    content_id: str
    writer: EntryWriter


def plan_draft(draft: Draft, source_id: str | None, max_file_bytes: int) -> EntryPlan:
    """The files of a draft. Pure, but slow for very many tensors.

    :raises DraftError: if the draft contradicts itself.
    :raises UnsupportedTensorError: if a file cannot hold one of its tensors.
    :raises InvalidIdentityError: if ``source_id`` is no identity.
    """
    if source_id is not None:
        check_identity(source_id)
    check_images(draft.images)
    check_metadata(draft.metadata)
    return plan_entry(draft.images, max_file_bytes)


@asynccontextmanager
async def write_aside(
    root: StoreRoot, crew: ThreadCrew, draft: Draft, plan: EntryPlan, source_id: str | None, progress: Progress | None
) -> AsyncIterator[Written]:
    """The draft's files, complete and on the disk, in ``tmp/``; what was not given a name by the end is removed.

    Cancellable between chunks, in the writing as in the body.

    :raises InsufficientDiskError: if the disk has, or gets, no room for them.
    :raises StoreOperationError: if the system refuses to write.
    """
    writer = await crew.call(partial(EntryWriter.begin, root, plan), undo=EntryWriter.discard, name="publication")
    try:
        sizes = [place.nbytes for place in plan.places]
        num_threads = root.options.effective_num_threads
        digests = await hash_images(sizes, draft.read, crew, num_threads, sink=writer, progress=progress)
        work = partial(_complete, writer, draft, plan, digests, source_id)
        yield Written(await crew.call(work, name="publication"), writer)
    finally:
        await crew.call_through(writer.discard)


def give_name(root: StoreRoot, written: Written, denied_here: Iterable[int]) -> int:
    """Make what was written the newest generation of its entry; its number. Blocks.

    For the holder of the content's publication lock: nobody else gives numbers meanwhile. ``denied_here`` are those
    that this process will not use again.
    """
    entry = root.paths.entry(written.content_id)
    prepare_folder(root.files, entry, root.options.dir_mode)
    sync_folder(root.files, os.path.dirname(entry))
    generation = next_generation(root.paths, written.content_id, denied_here)
    path = root.paths.generation(written.content_id, generation)
    root.files.rename(written.writer.folder.path, path)
    sync_folder(root.files, entry)
    sync_folder(root.files, root.paths.folder("tmp"))
    written.writer.harden()
    return generation


def sync_names(root: StoreRoot, content_id: str) -> None:
    """Bring the names that an entry has got to the disk; who gave them may have died before he could. Blocks."""
    entry = root.paths.entry(content_id)
    for folder in (os.path.dirname(entry), entry, root.paths.folder("tmp")):
        sync_folder(root.files, folder)


def _complete(writer: EntryWriter, draft: Draft, plan: EntryPlan, digests: Sequence[str], source_id: str | None) -> str:
    manifest = make_manifest(
        draft.images,
        plan,
        digests,
        draft.metadata,
        source_id=source_id,
        created_s=int(time.time()),
        writer=f"streamflow {__version__}",
    )
    writer.complete(manifest_bytes(manifest))
    return manifest.content_id
