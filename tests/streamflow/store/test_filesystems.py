"""Filesystems of other machines are refused by name; what is memory says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import streamflow.store.filesystems
from streamflow.store.errors import StoreCode, UnsupportedFilesystemError
from streamflow.store.filesystems import Filesystem, check_filesystem, filesystem_of, parse_mounts
from tests.streamflow.store.kit import opened

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 22 0:27 / /mnt/with\\040space rw shared:5 master:2 - nfs4 server:/x rw
32 22 0:28 / /mnt/buckets rw - fuse.s3fs s3fs rw
33 22 0:29 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("mount", "kind", "point"),
    [
        (22, "ext4", "/"),
        (31, "nfs4", "/mnt/with space"),
        (32, "fuse.s3fs", "/mnt/buckets"),
        (33, "tmpfs", "/dev/shm"),
        (99, "unknown", ""),
    ],
)
def test_the_mount_is_found_by_its_id(mount: int, kind: str, point: str) -> None:
    assert parse_mounts(f"pos:\t0\nflags:\t02\nmnt_id:\t{mount}\nino:\t7\n", MOUNTS) == Filesystem(kind, point)


def test_a_kernel_that_does_not_tell_is_no_reason_to_refuse() -> None:
    assert parse_mounts("pos:\t0\n", MOUNTS).kind == "unknown"


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "fuse.sshfs", "fuse.gcsfuse"])
def test_network_filesystems_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(streamflow.store.filesystems, "filesystem_of", lambda fd: Filesystem(kind, "/mnt"))
    with pytest.raises(UnsupportedFilesystemError, match=f"is on {kind}.*local disk") as caught:
        check_filesystem("/mnt/store", 0)
    assert caught.value.code is StoreCode.UNSUPPORTED_FILESYSTEM


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "fuse.ntfs-3g", "fuseblk", "unknown"])
def test_local_filesystems_are_not(kind: str) -> None:
    assert not Filesystem(kind, "/").is_network


def test_the_root_is_found_on_a_filesystem() -> None:
    fd = os.open("/", os.O_RDONLY)
    try:
        assert filesystem_of(fd).kind != "unknown"
    finally:
        os.close(fd)


@pytest.mark.anyio
async def test_a_store_on_a_network_filesystem_is_not_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamflow.store.filesystems, "filesystem_of", lambda fd: Filesystem("nfs4", "/mnt"))
    with pytest.raises(UnsupportedFilesystemError, match=str(root)):
        async with opened(root):
            raise AssertionError("it was opened")


@pytest.mark.anyio
async def test_a_store_in_memory_is_opened_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamflow.store.filesystems, "filesystem_of", lambda fd: Filesystem("tmpfs", "/dev/shm"))
    async with opened(root) as store:
        assert store.filesystem.is_memory
