"""A lease reads, maps and holds its generation; it is closed as a whole or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from pathlib import Path

import anyio
import pytest

from streamflow.stages.errors import SourceReadError
from streamflow.store.errors import InvalidIdentityError, LeaseClosedError, LeaseInUseError, LockTimeoutError
from streamflow.store.lease import Lease
from streamflow.store.store import HostWeightStore
from tests.streamflow.store.kit import model, opened, publish

pytestmark = pytest.mark.anyio


async def leased(store: HostWeightStore, content_id: str) -> Lease:
    lease = await store.lease(content_id)
    assert lease is not None
    return lease


async def test_what_is_not_there_is_a_miss(root: Path) -> None:
    async with opened(root) as store:
        assert await store.lease("0" * 64) is None
        assert await store.content_of("source") is None
        with pytest.raises(InvalidIdentityError):
            await store.lease("../" + "0" * 61)


async def test_any_part_of_an_image_is_read_to_an_address(root: Path) -> None:
    content_id = await publish(root)
    memory = ctypes.create_string_buffer(64)
    async with opened(root) as store:
        with await leased(store, content_id) as lease:
            lease.read_into(1, ctypes.addressof(memory), 1000, 64)
            assert memory.raw == model().data[1][1000:1064]
            lease.read_into(1, 0, 5, 0)
            for start, nbytes in ((-1, 4), (0, 70 << 10 | 1), (70 << 10, 1), (0, -1)):
                with pytest.raises(ValueError, match="not inside"):
                    lease.read_into(1, ctypes.addressof(memory), start, nbytes)


async def test_the_mapping_is_shared_read_only_and_made_once(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        with await leased(store, content_id) as lease:
            mapping = lease.mapping(0)
            assert lease.mapping(0) is mapping
            place = lease.place(1)
            assert bytes(mapping.memory(place.offset_bytes, place.nbytes)) == model().data[1]
            rights = Path("/proc/self/maps").read_text().split(f"{mapping.address:x}-")[1].split()[1]
            assert rights == "r--s"
        assert mapping.closed


async def test_a_lease_whose_views_are_alive_is_not_closed(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        lease = await leased(store, content_id)
        view = lease.mapping(0).memory(0, 8)
        with pytest.raises(LeaseInUseError, match="views of its mapping"):
            lease.close()
        assert not lease.closed
        lease.fill(0, memoryview(bytearray(8)), 0)
        view.release()
        lease.close()
        lease.close()
        assert lease.closed
        for use in (
            lambda: lease.mapping(0),
            lambda: lease.fileno(0),
            lambda: lease.fill(0, memoryview(bytearray(1)), 0),
        ):
            with pytest.raises(LeaseClosedError, match="lease the entry again"):
                use()
        assert lease.place(0).nbytes == 3 << 10


async def test_a_lease_that_is_being_read_is_not_closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content_id = await publish(root)
    reading, goes_on = threading.Event(), threading.Event()

    def slow(*arguments: object) -> None:
        reading.set()
        assert goes_on.wait(30)

    monkeypatch.setattr("streamflow.store.lease.read_fully", slow)
    async with opened(root) as store:
        lease = await leased(store, content_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, lease.fill, 0, memoryview(bytearray(8)), 0)
            await anyio.to_thread.run_sync(reading.wait)
            with pytest.raises(LeaseInUseError, match="1 reads"):
                lease.close()
            goes_on.set()
        lease.close()


async def test_a_file_that_shrank_is_an_error_and_no_signal(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        with await leased(store, content_id) as lease:
            os.truncate(f"/proc/self/fd/{lease.fileno(0)}", 70_000)
            with pytest.raises(SourceReadError, match="shrank"):
                lease.fill(1, memoryview(bytearray(64)), 0)
            with pytest.raises(SourceReadError):
                lease.mapping(0)


async def test_a_lease_outlives_the_store(root: Path) -> None:
    content_id = await publish(root)
    async with opened(root) as store:
        lease = await leased(store, content_id)
    with lease:
        lease.fill(0, memoryview(bytearray(8)), 0)


async def test_leasing_says_when_the_entry_was_last_used(root: Path) -> None:
    content_id = await publish(root)
    file = root / "entries" / content_id / "g1" / "lease"
    os.utime(file, (5, 5))
    async with opened(root) as store:
        (await leased(store, content_id)).close()
    assert file.stat().st_mtime > 5


async def test_a_generation_that_somebody_removes_is_waited_for_within_bounds(root: Path) -> None:
    content_id = await publish(root)
    file = root / "entries" / content_id / "g1" / "lease"
    async with opened(root, lock_wait_s=0.05) as store:
        with open(file) as remover:
            fcntl.flock(remover, fcntl.LOCK_EX)
            with pytest.raises(LockTimeoutError, match="lock_wait_s"):
                await store.lease(content_id)
        (await leased(store, content_id)).close()


async def test_a_generation_that_was_moved_away_while_it_was_opened_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever locked it before it was moved must look again: a new one may have its place."""
    content_id = await publish(root)
    entry = root / "entries" / content_id
    real = fcntl.flock

    def moving(fd: int, operation: int) -> None:
        real(fd, operation)
        if operation & fcntl.LOCK_SH and (entry / "g1").exists() and "lease" in os.readlink(f"/proc/self/fd/{fd}"):
            (entry / "g1").rename(root / "tmp" / "moved")

    async with opened(root) as store:
        monkeypatch.setattr(fcntl, "flock", moving)
        assert await store.lease(content_id) is None
