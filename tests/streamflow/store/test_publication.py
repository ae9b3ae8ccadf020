"""Publishing: what arrives, under which names, once, and never half."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from streamflow.store.access import StoreAccess
from streamflow.store.descriptors import num_open
from streamflow.store.draft import Draft
from streamflow.store.errors import (
    ContentChangedError,
    DraftError,
    IdentityCollisionError,
    InsufficientDiskError,
    InvalidIdentityError,
    StoreCode,
    UnsupportedTensorError,
)
from streamflow.store.eviction import Evicted
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.files import FileOperations
from streamflow.store.hashing import CHUNK_BYTES
from streamflow.store.packing import file_name
from streamflow.store.writing import WRITE_BYTES
from tests.streamflow.store.kit import Scripted, model, opened, tree, unfinished

pytestmark = pytest.mark.anyio


async def test_what_was_published_is_leased_byte_for_byte(root: Path) -> None:
    made = model(image_bytes=(3 << 10, 70 << 10, 512, 2 * CHUNK_BYTES + 256))
    async with opened(root, max_file_bytes=1 << 20) as store:
        published = await store.publish(made.draft(abi="1"), source_id="source")
        assert (published.generation, published.was_present) == (1, False)
        assert await store.content_of("source") == published.content_id
        lease = await store.lease(published.content_id)
        assert lease is not None
        with lease:
            assert len(lease.manifest.files) == 2
            assert lease.manifest.metadata == {"abi": "1"}
            assert lease.manifest.source_id == "source"
            assert tuple(stored.image for stored in lease.manifest.images) == made.images  # aliases and strides too
            for image, data in enumerate(made.data):
                found = bytearray(len(data))
                lease.fill(image, memoryview(found), 0)
                assert found == data
            await store.verify(lease)
    assert unfinished(root) == []


@pytest.mark.parametrize("is_known", [False, True])
async def test_no_eviction_comes_between_a_publication_and_its_lease(
    root: Path, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the publication's lock is free, somebody evicts all there is."""
    removed: list[Evicted] = []
    original = StoreAccess.publication_lock
    async with opened(root) as store:

        async def evict() -> None:
            removed.extend(await store.evict(EvictionPolicy(max_bytes=0)))

        @asynccontextmanager
        async def evicting_at_once(access: StoreAccess, identity: str) -> AsyncIterator[None]:
            async with original(access, identity):
                yield
            await evict()

        monkeypatch.setattr(StoreAccess, "publication_lock", evicting_at_once)
        content_id = await store.content_id(model().draft()) if is_known else None
        published, lease = await store.publish_leased(model().draft(), source_id="source", content_id=content_id)
        with lease:
            assert (published.generation, lease.generation) == (1, 1)
            await store.verify(lease)
            assert removed == []
        await evict()
        assert [found.content_id for found in removed] == [published.content_id]
    assert num_open() == 0


async def test_a_publication_that_is_cancelled_at_its_end_keeps_no_lease(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StoreAccess.publication_lock

    @asynccontextmanager
    async def cancelled_at_the_end(access: StoreAccess, identity: str) -> AsyncIterator[None]:
        async with original(access, identity):
            yield
        scope.cancel()
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(StoreAccess, "publication_lock", cancelled_at_the_end)
    async with opened(root) as store:
        with anyio.CancelScope() as scope:
            await store.publish_leased(model().draft(), source_id="source")
        assert scope.cancelled_caught
    assert num_open() == 0


async def test_every_byte_is_read_once(root: Path) -> None:
    made = model(image_bytes=(3 << 10, CHUNK_BYTES + 256, 512))
    seen: list[tuple[int, int, int]] = []

    def read(image: int, target: memoryview, start: int) -> None:
        seen.append((image, start, start + target.nbytes))
        made.read(image, target, start)

    async with opened(root) as store:
        await store.publish(Draft(made.images, read, {}), source_id=None)
    for image, stored in enumerate(made.images):
        pieces = sorted((start, end) for found, start, end in seen if found == image)
        assert [0, *(end for _, end in pieces)] == [*(start for start, _ in pieces), stored.nbytes]


async def test_what_is_large_is_written_in_large_pieces_that_end_at_round_offsets(root: Path) -> None:
    made = model(image_bytes=(5 << 20, 2 * WRITE_BYTES + 512))
    ends: dict[int, list[tuple[int, int]]] = {}

    def before(number: int, operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "pwrite":
            fd, data, offset = arguments
            ends.setdefault(fd, []).append((offset, offset + data.nbytes))

    async with opened(root, Scripted(before)) as store:
        published = await store.publish(made.draft(), source_id=None)
        lease = await store.lease(published.content_id)
        assert lease is not None
        with lease:
            first, second = (lease.place(image).offset_bytes for image in (0, 1))
            await store.verify(lease)
    pieces = sorted(max(ends.values(), key=lambda found: found[-1]))[1:]  # without the header
    assert pieces == [
        (first, first + (5 << 20)),
        (second, WRITE_BYTES),
        (WRITE_BYTES, 2 * WRITE_BYTES),
        (2 * WRITE_BYTES, second + 2 * WRITE_BYTES + 512),
    ]


async def test_the_content_id_is_known_without_writing(root: Path) -> None:
    async with opened(root) as store:
        before = tree(root)
        content_id = await store.content_id(model().draft())
        assert tree(root) == before
        assert (await store.publish(model().draft(), source_id=None)).content_id == content_id
        assert await store.content_id(model().draft(other="metadata")) == content_id
        assert await store.content_id(model(seed=1).draft()) != content_id


async def test_who_owns_which_bytes_is_part_of_the_content(root: Path) -> None:
    made = model()
    first, *others = made.images
    tensor = first.tensors[1]
    async with opened(root) as store:
        ids = {await store.content_id(made.draft())}
        for change in (
            {"kind": "parameter"},
            {"name": "other"},
            {"dtype": "float16"},
            {"aliases": ()},
            {"shape": (tensor.shape[0] * 2, 1), "stride": (1, 1)},
            {"stride": (2, 1)},
        ):
            changed = attrs.evolve(first, tensors=(first.tensors[0], attrs.evolve(tensor, **change)))
            ids.add(await store.content_id(Draft((changed, *others), made.read, {})))
        ids.add(await store.content_id(Draft((attrs.evolve(first, role="fixed"), *others), made.read, {})))
    assert len(ids) == 8


async def test_how_images_are_packed_into_files_is_not(root: Path) -> None:
    async with opened(root, max_file_bytes=1) as store:
        small = await store.publish(model().draft(), source_id=None)
    async with opened(root) as store:
        assert await store.publish(model().draft(), source_id=None) == attrs.evolve(small, was_present=True)


@pytest.mark.parametrize("known", [False, True])
async def test_publishing_again_finds_it(root: Path, known: bool) -> None:
    async with opened(root) as store:
        first = await store.publish(model().draft(), source_id="one")
        content_id = first.content_id if known else None
        again = await store.publish(model().draft(), source_id="two", content_id=content_id)
        assert again == attrs.evolve(first, was_present=True)
        assert await store.content_of("two") == first.content_id
    assert unfinished(root) == []


async def test_a_known_content_that_is_there_is_not_even_read(root: Path) -> None:
    def read(image: int, target: memoryview, start: int) -> None:
        raise AssertionError("it was read")

    async with opened(root) as store:
        first = await store.publish(model().draft(), source_id=None)
        draft = Draft(model().images, read, {})
        assert (await store.publish(draft, source_id=None, content_id=first.content_id)).was_present


async def test_who_publishes_the_same_at_once_writes_it_once(root: Path) -> None:
    async with opened(root) as store, anyio.create_task_group() as tasks:
        content_id = await store.content_id(model().draft())
        found = []

        async def publish() -> None:
            found.append(await store.publish(model().draft(), source_id="source", content_id=content_id))

        for _ in range(4):
            tasks.start_soon(publish)
    assert sorted(published.was_present for published in found) == [False, True, True, True]
    assert {published.generation for published in found} == {1}


async def test_one_source_with_two_contents_is_a_collision(root: Path) -> None:
    async with opened(root) as store:
        first = await store.publish(model(0).draft(), source_id="source")
        before = tree(root)
        with pytest.raises(IdentityCollisionError, match="not deterministic") as caught:
            await store.publish(model(1).draft(), source_id="source")
        assert (caught.value.known, caught.value.is_retryable) == (first.content_id, False)
        assert await store.content_of("source") == first.content_id
        assert {path for path in tree(root) - before if not path.startswith("locks/")} == set()
        await store.publish(model(1).draft(), source_id="other")
        with pytest.raises(IdentityCollisionError):  # also when the content is there already
            await store.publish(model(1).draft(), source_id="source")


async def test_a_content_that_changed_since_it_was_hashed_is_not_published(root: Path) -> None:
    made = model()
    async with opened(root) as store:
        content_id = await store.content_id(made.draft())
        made.data[1][5] ^= 1
        with pytest.raises(ContentChangedError, match="leave the model alone") as caught:
            await store.publish(made.draft(), source_id=None, content_id=content_id)
        assert not caught.value.is_retryable
        assert await store.lease(content_id) is None
    assert unfinished(root) == []


async def test_entries_are_hardened(root: Path) -> None:
    async with opened(root, dir_mode=0o750, file_mode=0o640) as store:
        published = await store.publish(model().draft(), source_id=None)
    entry = root / "entries" / published.content_id / "g1"
    assert stat.S_IMODE(entry.stat().st_mode) == 0o550
    assert {stat.S_IMODE(file.stat().st_mode) for file in entry.iterdir()} == {0o440}
    assert {file.name for file in entry.iterdir()} == {"lease", "manifest.json", file_name(0)}


async def test_files_are_synced_before_the_folder_and_the_folder_before_it_gets_its_name(root: Path) -> None:
    names: dict[int, str] = {}
    log: list[tuple[str, str]] = []

    class Logged(FileOperations):
        def open(self, path: str, flags: int, mode: int = 0) -> int:
            fd = super().open(path, flags, mode)
            names[fd] = os.path.relpath(path, root)
            return fd

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            log.append(("pwrite", names[fd]))
            return super().pwrite(fd, data, offset)

        def fsync(self, fd: int) -> None:
            log.append(("fsync", names[fd]))
            super().fsync(fd)

        def rename(self, source: str, target: str) -> None:
            log.append(("rename", os.path.relpath(target, root)))
            super().rename(source, target)

    async with opened(root, Logged(), num_threads=1) as store:
        log.clear()
        content_id = (await store.publish(model().draft(), source_id="source")).content_id
    naming = log.index(("rename", f"entries/{content_id}/g1"))
    written = {name for operation, name in log[:naming] if operation == "pwrite"}
    folder = os.path.dirname(next(iter(written)))
    for name in written:
        last_write = max(i for i, step in enumerate(log) if step == ("pwrite", name))
        assert last_write < log.index(("fsync", name)) < log.index(("fsync", folder)) < naming
    assert {os.path.basename(name) for name in written} == {file_name(0), "manifest.json"}
    assert ("fsync", f"{folder}/lease") in log[:naming]
    source = log.index(("rename", "sources/source.json"))
    for name in ("entries", f"entries/{content_id}", "tmp"):
        assert any(step == ("fsync", name) for step in log[:source]), name
    assert ("fsync", f"entries/{content_id}") in log[naming:source]
    assert ("fsync", "sources") in log[source:]


async def test_progress_goes_to_the_end(root: Path) -> None:
    seen: list[tuple[int, int]] = []
    async with opened(root) as store:
        await store.publish(model().draft(), source_id=None, progress=lambda done, total: seen.append((done, total)))
    total = sum(image.nbytes for image in model().images)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


async def test_a_disk_without_room_is_told_before_anything_is_written(root: Path) -> None:
    class Full(FileOperations):
        def free_bytes(self, path: str) -> tuple[int, int]:
            return 5 << 20, 100 << 20

    async with opened(root, Full(), free_space_headroom_fraction=0.02) as store:
        before = tree(root)
        with pytest.raises(InsufficientDiskError, match="evict") as caught:
            await store.publish(model().draft(), source_id=None)
        assert (caught.value.available, caught.value.headroom) == (5 << 20, 2 << 20)
        assert caught.value.code is StoreCode.INSUFFICIENT_DISK
        assert tree(root) == before
    async with opened(root, Full()) as store:
        await store.publish(model().draft(), source_id=None)


async def test_a_failing_producer_is_raised_as_it_is(root: Path) -> None:
    class ProducerError(OSError):
        pass

    def read(image: int, target: memoryview, start: int) -> None:
        raise ProducerError("no weights")

    async with opened(root) as store:
        with pytest.raises(ProducerError, match="no weights"):
            await store.publish(Draft(model().images, read, {}), source_id=None)
    assert unfinished(root) == []


async def test_what_cannot_be_stored_is_refused_before_it_is_read(root: Path) -> None:
    made = model()
    expanded = attrs.evolve(made.images[0].tensors[1], shape=(3, 2), stride=(0, 1))
    drafts = {
        UnsupportedTensorError: Draft((attrs.evolve(made.images[0], tensors=(expanded,)),), made.read, {}),
        DraftError: Draft((), made.read, {}),
    }
    async with opened(root) as store:
        for error, draft in drafts.items():
            with pytest.raises(error):
                await store.publish(draft, source_id=None)
            with pytest.raises(error):
                await store.content_id(draft)
        with pytest.raises(InvalidIdentityError):
            await store.publish(made.draft(), source_id="../x")


async def test_images_without_bytes_are_stored_too(root: Path) -> None:
    made = model(image_bytes=(512,))
    nothing = attrs.evolve(made.images[0], name="nothing", nbytes=0, tensors=())
    async with opened(root) as store:
        published = await store.publish(Draft((*made.images, nothing), made.read, {}), source_id=None)
        lease = await store.lease(published.content_id)
        assert lease is not None
        with lease:
            assert lease.place(1).nbytes == 0
            await store.verify(lease)


async def test_a_cancelled_publication_stops_at_the_next_chunk_and_leaves_nothing(root: Path) -> None:
    made = model(image_bytes=(8 * CHUNK_BYTES,))
    reads: list[int] = []
    async with opened(root, num_threads=1) as store, anyio.create_task_group() as tasks:

        def read(image: int, target: memoryview, start: int) -> None:
            reads.append(start)
            if len(reads) == 3:
                anyio.from_thread.run_sync(tasks.cancel_scope.cancel)
            made.read(image, target, start)

        tasks.start_soon(lambda: store.publish(Draft(made.images, read, {}), source_id=None, content_id=CONTENT))
    assert len(reads) in (3, 4)
    assert unfinished(root) == []
    async with opened(root, publication_wait_s=0.01) as store, store.publication_lock(CONTENT):
        pass


CONTENT = "0" * 64


async def test_a_cancelled_publication_waits_for_its_threads(root: Path) -> None:
    """The disk is never written to after the call has returned."""
    writes: list[str] = []
    scope = anyio.CancelScope()

    def before(number: int, operation: str, arguments: object) -> None:
        writes.append(operation)
        if writes.count("pwrite") == 5:
            anyio.from_thread.run_sync(scope.cancel)

    async with opened(root, Scripted(before)) as store:
        with scope:
            await store.publish(model(image_bytes=(CHUNK_BYTES,) * 4).draft(), source_id="source")
        assert scope.cancelled_caught
        counted = len(writes)
        assert unfinished(root) == []
    assert len(writes) == counted
