"""A damaged generation that cannot be moved aside is marked, and one that cannot be marked is at least remembered."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from streamflow.store.errors import EntryRejectedError, InvalidIdentityError
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.files import FileOperations
from streamflow.store.packing import file_name
from tests.streamflow.store.kit import model, opened, publish, tree

pytestmark = pytest.mark.anyio


class Foreign(FileOperations):
    """The disk as a user meets it who does not own the entries; with ``writable`` False, nor the store."""

    def __init__(self, writable: bool) -> None:
        self.writable = writable

    def rename(self, source: str, target: str) -> None:
        if "/entries/" in source or ("/denied/" in target and not self.writable):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), source)
        super().rename(source, target)


async def damaged(root: Path) -> str:
    content_id = await publish(root)
    with open(root / "entries" / content_id / "g1" / file_name(0), "r+b") as file:
        file.seek(70_000)
        file.write(b"damage")
    return content_id


async def test_one_that_cannot_be_moved_is_denied_to_everybody_and_rebuilt_beside(root: Path) -> None:
    content_id = await damaged(root)
    async with opened(root, Foreign(writable=True), verification="digest") as store:
        with pytest.raises(EntryRejectedError) as caught:
            await store.lease(content_id)
        assert caught.value.disposition == "denied"
        assert await store.lease(content_id) is None
    marker = json.loads((root / "denied" / f"{content_id}.g1").read_text())
    assert "could not be moved" in marker["reason"]
    async with opened(root) as other:
        assert await other.lease(content_id) is None
        assert [info.is_denied for info in await other.entries()] == [True]
        again = await other.publish(model().draft(), source_id="source-0")
        assert (again.generation, again.was_present) == (2, False)
        assert await other.evict(EvictionPolicy()) != ()  # its owner can
        assert [info.generation for info in await other.entries()] == [2]
    assert [path for path in tree(root) if path.startswith("denied/")] == []


async def test_one_that_cannot_be_marked_either_is_not_used_by_this_store(root: Path) -> None:
    content_id = await damaged(root)
    async with opened(root, Foreign(writable=False), verification="digest") as store:
        with pytest.raises(EntryRejectedError) as caught:
            await store.lease(content_id)
        assert caught.value.disposition == "denied by this process"
        assert await store.lease(content_id) is None
        assert [info.is_denied for info in await store.entries()] == [True]
        assert await store.evict(EvictionPolicy()) == ()


async def test_a_new_generation_never_has_the_number_of_an_old_one(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        for generation in (1, 2, 3):
            await store.quarantine(content_id, generation, "a test")
            await store.quarantine(content_id, generation, "again: it is gone, and nothing else is touched")
            published = await store.publish(model().draft(), source_id="source-0")
            assert (published.generation, published.was_present) == (generation + 1, False)
        assert [info.generation for info in await store.entries()] == [4]


async def test_what_is_no_entry_cannot_be_quarantined(root: Path) -> None:
    async with opened(root) as store:
        with pytest.raises(InvalidIdentityError):
            await store.quarantine("../..", 1, "a test")
