"""A store's folder is made with the modes of the options, and refused where others could change it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from streamflow.store.errors import LockFailedError, RootRefusedError, StoreCode, StoreFormatError
from streamflow.store.files import FileOperations
from streamflow.store.paths import FOLDERS
from streamflow.store.trust import why_not_trusted
from tests.streamflow.store.kit import opened, unfinished

pytestmark = pytest.mark.anyio


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("dir_mode", "file_mode"), [(0o755, 0o644), (0o2770, 0o660)])
async def test_the_folder_is_made_with_these_modes_whatever_the_umask(
    root: Path, dir_mode: int, file_mode: int
) -> None:
    umask = os.umask(0o077)
    try:
        async with opened(root / "deep" / "store", dir_mode=dir_mode, file_mode=file_mode):
            pass
    finally:
        os.umask(umask)
    store = root / "deep" / "store"
    assert {mode(path) for path in (store, *(store / name for name in FOLDERS))} == {dir_mode}
    assert mode(store / "store.json") == mode(store / "locks" / "@check.lock") == file_mode
    assert mode(root) == 0o700
    assert unfinished(store) == []


async def test_it_can_be_opened_again_and_by_two_at_once(root: Path) -> None:
    async with opened(root) as first, opened(root) as second:
        assert "open, on" in repr(first)
    assert "closed" in repr(second)


async def test_a_folder_that_others_may_write_to_is_refused_unless_allowed(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(RootRefusedError, match=r"0o777 lets others write.*dir_mode") as caught:
        async with opened(root, dir_mode=0o775):
            raise AssertionError("it was opened")
    assert caught.value.code is StoreCode.INVALID_CONFIGURATION
    async with opened(root, dir_mode=0o777):
        pass


async def test_a_part_of_it_that_others_may_write_to_is_refused_too(root: Path) -> None:
    async with opened(root):
        pass
    (root / "sources").chmod(0o777)
    with pytest.raises(RootRefusedError, match="sources"):
        async with opened(root):
            raise AssertionError("it was opened")


@pytest.mark.parametrize("kind", ["file", "symlink"])
async def test_what_is_no_folder_is_refused(root: Path, kind: str, tmp_path: Path) -> None:
    async with opened(root):
        pass
    (root / "tmp").rmdir()
    if kind == "file":
        (root / "tmp").touch()
    else:
        (root / "tmp").symlink_to(tmp_path)
    with pytest.raises(RootRefusedError, match="not a folder"):
        async with opened(root):
            raise AssertionError("it was opened")


@pytest.mark.parametrize("text", ["", "{}", '{"format": "streamflow store", "version": 2}', "[]"])
async def test_a_store_of_another_format_is_refused(root: Path, text: str) -> None:
    async with opened(root):
        pass
    (root / "store.json").write_text(text)
    with pytest.raises(StoreFormatError, match="another root"):
        async with opened(root):
            raise AssertionError("it was opened")


class NoLocks(FileOperations):
    def flock(self, fd: int, operation: int) -> None:
        pass


class UnknownLocks(FileOperations):
    def flock(self, fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("files", [NoLocks(), UnknownLocks()], ids=["no-op", "ENOSYS"])
async def test_where_locks_do_not_lock_the_store_is_refused(root: Path, files: FileOperations) -> None:
    with pytest.raises(LockFailedError) as caught:
        async with opened(root, files):
            raise AssertionError("it was opened")
    assert caught.value.code is StoreCode.LOCK_FAILED


async def test_the_check_of_the_locks_does_not_mind_others_that_check(root: Path) -> None:
    async with opened(root):
        pass
    with open(root / "locks" / "@check.lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        async with opened(root):
            pass


ME, MINE = os.geteuid(), os.getegid()


@pytest.mark.parametrize(
    ("owner", "group", "found", "allowed", "trusted"),
    [
        (ME, MINE, 0o755, 0o755, True),
        (0, 0, 0o755, 0o755, True),
        (ME + 1, MINE, 0o755, 0o755, False),
        (ME + 1, MINE, 0o775, 0o775, True),
        (ME + 1, MINE + 99999, 0o775, 0o775, False),
        (ME + 1, MINE + 99999, 0o777, 0o777, True),
        (ME, MINE, 0o775, 0o755, False),
        (ME, MINE, 0o757, 0o775, False),
        (ME, MINE, 0o700, 0o775, True),
    ],
)
async def test_who_is_trusted(owner: int, group: int, found: int, allowed: int, trusted: bool) -> None:
    status = os.stat_result((stat.S_IFDIR | found, 1, 1, 1, owner, group, 0, 0, 0, 0))
    assert (why_not_trusted(status, allowed) is None) == trusted
