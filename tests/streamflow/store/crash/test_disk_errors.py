"""A disk that is full or broken at any operation: a typed error, nothing left behind, and publishing works again."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamflow.store.descriptors import num_open
from streamflow.store.errors import InsufficientDiskError, LockFailedError, StoreError, StoreOperationError
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.store import HostWeightStore
from tests.streamflow.store.crash.kit import (
    SOURCE,
    Stepped,
    flip_a_byte,
    locked_files,
    opened,
    publish_source,
    tiny,
    unfinished,
)

MODEL = tiny()
#: More than any scenario has operations.
MANY = 500
#: What removes things: where it fails once, the leftovers are the next writer's to remove.
REMOVING = ("unlink", "rmdir")
TYPED: dict[int, type[StoreError]] = {errno.ENOSPC: InsufficientDiskError, errno.EIO: StoreOperationError}


def failing(point: int, code: int, failed: list[str], *, for_good: bool) -> Stepped:
    """Operations that fail at this point; ``for_good``: and at every later one that needs the disk."""

    def before(number: int, operation: str, arguments: tuple[Any, ...]) -> None:
        if number == point or (for_good and number > point and operation not in ("flock", *REMOVING)):
            failed.append(operation)
            raise OSError(code, os.strerror(code))

    return Stepped(before)


async def publish(store: HostWeightStore) -> None:
    (await publish_source(store, MODEL)).close()


async def publish_known(store: HostWeightStore) -> None:
    content_id = await store.content_id(MODEL.draft())
    await store.publish(MODEL.draft(), source_id=SOURCE, content_id=content_id)


async def evict(store: HostWeightStore) -> None:
    await store.evict(EvictionPolicy(max_bytes=0))


async def sound(base: Path) -> None:
    async with opened(base) as store:
        await publish(store)


async def damaged(base: Path) -> None:
    await sound(base)
    flip_a_byte(base)


async def nothing(base: Path) -> None:
    pass


#: What is there, what is done, and the operations whose failure leaves something for the next publication to remove:
#: what was moved out of sight is removed only once that is certain.
SCENARIOS = {
    "cold": (nothing, publish, REMOVING),
    "rebuild": (damaged, publish_known, REMOVING),
    "evict": (sound, evict, (*REMOVING, "fsync")),
}


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("code", TYPED, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_failing_operation_is_a_typed_error_and_leaves_nothing(
    tmp_path: Path, name: str, code: int, for_good: bool
) -> None:
    """At every point, under the two event loops in turn."""
    prepare, work, may_leave = SCENARIOS[name]
    base, root = tmp_path / "base", tmp_path / "store"
    anyio.run(prepare, base)
    raised = 0
    for point, backend in zip(range(MANY), itertools.cycle(["asyncio", "trio"])):
        if base.exists():
            shutil.copytree(base, root)
        failed: list[str] = []
        files = failing(point, code, failed, for_good=for_good)
        raised += anyio.run(fails_well, root, files, work, code, backend=backend)
        if not for_good and not set(failed) & set(may_leave) and (root / "tmp").exists():
            assert unfinished(root) == [], f"left by a failing {failed} ({point})"
        anyio.run(works_next, root, backend=backend)
        shutil.rmtree(root)
        if not failed:
            break
    assert not failed, "there was no end of points"
    assert raised > 5


async def fails_well(root: Path, files: Stepped, work: Callable[[HostWeightStore], Any], code: int) -> bool:
    """Whether it failed; if so, by an error of the right type."""
    descriptors = num_open()
    try:
        async with opened(root, files) as store:
            await work(store)
    except LockFailedError as failure:
        assert isinstance(failure.__cause__, OSError)
        assert failure.__cause__.errno == code
    except TYPED[code] as failure:
        assert failure.is_retryable
        assert failure.code in ("insufficient_disk", "operation_failed")
    else:
        return False
    finally:
        assert num_open() == descriptors, "something stayed open"
        assert locked_files(root) == []
    return True


async def works_next(root: Path) -> None:
    """Damage that was planted is met by asking for the content: the entry is put aside then."""
    async with opened(root) as store:
        content_id = await store.content_id(MODEL.draft())
        published = await store.publish(MODEL.draft(), source_id=SOURCE, content_id=content_id)
        lease = await store.lease(published.content_id)
        assert lease is not None
        with lease:
            assert MODEL.is_in(lease)
        await store.publish(tiny(seed=3, sizes=(32,)).draft(), source_id=None)
    assert unfinished(root) == []
