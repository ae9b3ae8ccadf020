"""A disk that fails at any step: a typed error, nothing half-done, and the next attempt succeeds."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from streamflow.store.errors import InsufficientDiskError, StoreError, StoreOperationError
from tests.streamflow.store.kit import Scripted, failing_at, model, opened, tree, unfinished

pytestmark = pytest.mark.anyio


async def steps_of_a_publication(root: Path) -> tuple[int, int]:
    """The numbers of the first operation of a publication, and of the first after it."""
    files = Scripted(lambda number, operation, arguments: None)
    async with opened(root):  # made by a disk that works: what is counted is the publication
        pass
    async with opened(root, files, num_threads=1) as store:
        first = files.count
        await store.publish(model().draft(), source_id="source")
        return first, files.count


@pytest.mark.parametrize(("code", "anyio_backend"), [(errno.ENOSPC, "asyncio"), (errno.EIO, "trio")])
async def test_publishing_again_repairs_what_a_failing_disk_left(quick_root: Path, code: int) -> None:
    first, last = await steps_of_a_publication(quick_root / "counted")
    assert last - first > 30
    expected = InsufficientDiskError if code == errno.ENOSPC else StoreOperationError
    num_failed = 0
    for step in range(first, last):
        there = quick_root / str(step)
        async with opened(there):
            pass
        async with opened(there, failing_at(step, code), num_threads=1) as store:
            try:
                await store.publish(model().draft(), source_id="source")
            except StoreError as failure:
                assert isinstance(failure, expected)
                assert failure.is_retryable
                num_failed += 1
        assert not [path for path in tree(there / "entries") if path.count("/") > 1 and "/g1" not in path]
        async with opened(there, verification="digest") as store:
            content_id = (await store.publish(model().draft(), source_id="source")).content_id
            lease = await store.lease(content_id)
            assert lease is not None
            lease.close()
            assert await store.content_of("source") == content_id
        assert unfinished(there) == []
    assert num_failed > (last - first) // 2


async def test_what_a_failing_disk_left_is_used_where_it_is_whole(root: Path) -> None:
    """A failure after the entry got its name loses nothing."""

    def fail(number: int, operation: str, arguments: tuple[str, ...]) -> None:
        if operation == "rename" and "sources" in arguments[1]:
            raise OSError(errno.EIO, "no")

    async with opened(root, Scripted(fail)) as store:
        with pytest.raises(StoreOperationError, match="remembering a source"):
            await store.publish(model().draft(), source_id="source")
    async with opened(root) as store:
        assert await store.content_of("source") is None
        assert (await store.publish(model().draft(), source_id="source")).was_present


async def test_an_opening_that_fails_at_any_step_can_be_repeated(quick_root: Path) -> None:
    files = Scripted(lambda number, operation, arguments: None)
    quick_root.mkdir()
    async with opened(quick_root / "counted", files):
        pass
    assert files.count > 20
    for step in range(files.count):
        with pytest.raises(StoreOperationError, match=f"{step}"):
            async with opened(quick_root / str(step), failing_at(step, errno.EIO)):
                raise AssertionError("it was opened")
        async with opened(quick_root / str(step)) as store:
            await store.publish(model().draft(), source_id="source")
        assert unfinished(quick_root / str(step)) == []
