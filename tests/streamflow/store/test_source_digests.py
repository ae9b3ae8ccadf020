"""Digests of source files: right, remembered, and forgotten as soon as anything may have changed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamflow.store.source_digests
from streamflow.stages.errors import SourceReadError
from streamflow.store.errors import InsufficientDiskError, SourceChangedError, StoreOperationError
from streamflow.store.files import FileOperations
from streamflow.store.hashing import CHUNK_BYTES
from streamflow.store.source_digests import SETTLE_S
from tests.streamflow.store.kit import opened

pytestmark = pytest.mark.anyio
Later = Callable[[float], None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(CHUNK_BYTES * 2 + 5))
    return path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Lets that much time pass for the store, without waiting for it."""

    class Clock:
        @staticmethod
        def time() -> float:
            return time.time() + passed

    passed = 0.0

    def set_later(seconds: float) -> None:
        nonlocal passed
        passed = seconds

    monkeypatch.setattr(streamflow.store.source_digests, "time", Clock)
    return set_later


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets at which source files were read."""
    found: list[int] = []
    real = streamflow.store.source_digests.read_fully

    def counted(fd: int, buffer: memoryview, offset: int, path: str, file_bytes: int) -> None:
        found.append(offset)
        real(fd, buffer, offset, path, file_bytes)

    monkeypatch.setattr(streamflow.store.source_digests, "read_fully", counted)
    return found


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def test_a_digest_is_right_and_remembered_by_other_stores_too(
    root: Path, source: Path, later: Later, reads: list[int]
) -> None:
    later(SETTLE_S + 1)
    async with opened(root) as store:
        assert await store.source_digest(source) == sha(source)
        assert len(reads) == 3
    async with opened(root) as store:
        assert await store.source_digest(str(source)) == sha(source)
    assert len(reads) == 3


async def test_a_file_that_was_just_written_is_not_remembered(
    root: Path, source: Path, later: Later, reads: list[int]
) -> None:
    async with opened(root) as store:
        later(SETTLE_S - 1)
        for times in (1, 2):
            assert await store.source_digest(source) == sha(source)
            assert len(reads) == 3 * times
        later(-3600)  # a clock that was set back
        await store.source_digest(source)
        assert len(reads) == 9
    assert os.listdir(root / "digests") == []


async def test_new_bytes_of_the_same_size_and_time_are_noticed(root: Path, source: Path, later: Later) -> None:
    later(SETTLE_S + 1)
    async with opened(root) as store:
        before = await store.source_digest(source)
        status = source.stat()
        data = bytearray(source.read_bytes())
        data[7] ^= 1
        with source.open("r+b") as file:
            file.write(data)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
        now = source.stat()
        assert (now.st_ino, now.st_size, now.st_mtime_ns) == (status.st_ino, status.st_size, status.st_mtime_ns)
        assert await store.source_digest(source) == sha(source) != before


@pytest.mark.parametrize("is_remembered", [False, True])
async def test_a_file_that_replaced_the_opened_one_is_not_hashed_for_it(
    root: Path, source: Path, later: Later, is_remembered: bool
) -> None:
    later(SETTLE_S + 1 if is_remembered else 0)
    opened_before = source.stat()
    other = source.with_name("other")
    other.write_bytes(source.read_bytes()[::-1])
    async with opened(root) as store:
        assert await store.source_digest(source, opened_before) == sha(source)
        other.rename(source)
        if is_remembered:
            await store.source_digest(source)
        with pytest.raises(SourceChangedError, match="changed while it was opened and hashed"):
            await store.source_digest(source, opened_before)
        assert await store.source_digest(source, source.stat()) == sha(source)


@pytest.mark.parametrize("field", ["path", "device", "inode", "size", "mtime_ns", "ctime_ns", "sha256"])
async def test_a_remembered_digest_that_does_not_fit_is_not_used(
    root: Path, source: Path, later: Later, field: str
) -> None:
    later(SETTLE_S + 1)
    async with opened(root) as store:
        digest = await store.source_digest(source)
        (path,) = (root / "digests").iterdir()
        record: dict[str, Any] = json.loads(path.read_text())
        record[field] = 5
        path.write_text(json.dumps(record))
        assert await store.source_digest(source) == digest
        assert json.loads(path.read_text())["sha256"] == digest


@pytest.mark.parametrize("text", ["", "{}", "[]", "x", '{"sha256": "0"}'])
async def test_a_damaged_record_is_not_used(root: Path, source: Path, later: Later, text: str) -> None:
    later(SETTLE_S + 1)
    async with opened(root) as store:
        digest = await store.source_digest(source)
        (path,) = (root / "digests").iterdir()
        path.write_text(text)
        assert await store.source_digest(source) == digest


async def test_a_record_that_others_could_have_written_is_not_used(root: Path, source: Path, later: Later) -> None:
    later(SETTLE_S + 1)
    async with opened(root) as store:
        digest = await store.source_digest(source)
        (path,) = (root / "digests").iterdir()
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "sha256": "0" * 64}))
        path.chmod(0o666)
        assert await store.source_digest(source) == digest


class NoWrites(FileOperations):
    """Of a store that is mounted read-only, or belongs to others."""

    def __init__(self, number: int) -> None:
        self.number = number

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        if flags & os.O_EXCL:
            raise OSError(self.number, os.strerror(self.number), path)
        return super().open(path, flags, mode)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
async def test_a_store_that_is_for_reading_only_gives_digests_all_the_same(
    root: Path, source: Path, later: Later, number: int
) -> None:
    later(SETTLE_S + 1)
    async with opened(root):
        pass
    async with opened(root, files=NoWrites(number)) as store:
        assert await store.source_digest(source) == sha(source)
    assert os.listdir(root / "digests") == []
    with pytest.raises(InsufficientDiskError):
        async with opened(root, files=NoWrites(errno.ENOSPC)) as store:
            await store.source_digest(source)


async def test_a_link_is_hashed_as_what_it_leads_to(root: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    async with opened(root) as store:
        assert await store.source_digest(tmp_path / "link") == sha(source)


async def test_a_file_that_changes_while_it_is_hashed_is_an_error(
    root: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = streamflow.store.source_digests.read_fully

    def touching(fd: int, buffer: memoryview, offset: int, path: str, file_bytes: int) -> None:
        real(fd, buffer, offset, path, file_bytes)
        os.utime(source, (1, 1))

    monkeypatch.setattr(streamflow.store.source_digests, "read_fully", touching)
    async with opened(root) as store:
        with pytest.raises(SourceChangedError, match=r"model\.safetensors changed"):
            await store.source_digest(source)


async def test_a_file_that_is_missing_or_shrinks_is_an_error(
    root: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = streamflow.store.source_digests.read_fully

    def shrinking(fd: int, buffer: memoryview, offset: int, path: str, file_bytes: int) -> None:
        os.truncate(source, 10)
        real(fd, buffer, offset, path, file_bytes)

    async with opened(root) as store:
        with pytest.raises(StoreOperationError, match="No such file"):
            await store.source_digest(source.with_name("other"))
        monkeypatch.setattr(streamflow.store.source_digests, "read_fully", shrinking)
        with pytest.raises(SourceReadError, match="shrank"):
            await store.source_digest(source)


async def test_hashing_ends_at_the_next_chunk_when_it_is_cancelled(
    root: Path, source: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = anyio.CancelScope()
    counted = streamflow.store.source_digests.read_fully

    def cancelling(*arguments: Any) -> None:
        counted(*arguments)
        anyio.from_thread.run_sync(scope.cancel)

    monkeypatch.setattr(streamflow.store.source_digests, "read_fully", cancelling)
    async with opened(root) as store:
        with scope:
            await store.source_digest(source)
    assert scope.cancelled_caught
    assert len(reads) in (1, 2)
