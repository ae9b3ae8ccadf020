"""Hardened entries without root's rights: their owner can move and remove them, others can only mark them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest

from tests.streamflow.store.kit import publish, tree

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
"""Owners are tested as whoever runs the tests; strangers need a second user."""

NOBODY, SOMEBODY = 65_534, 65_533

#: Becomes another user for good, then does what it is told; imports come first, that user may not read the code.
PROGRAM = """
import json, os, sys
import anyio
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.errors import EntryRejectedError, StoreError
from tests.streamflow.store.kit import model, opened
import streamflow.stages.threads, anyio._backends._asyncio
root, user, steps, changes = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(), json.loads(sys.argv[4])
if os.geteuid() == 0 != user:
    os.setgroups([])
    os.setresgid(65500, 65500, 65500)
    os.setresuid(user, user, user)
    assert os.geteuid() == user
CONTENT = None
async def main():
    async with opened(root, **changes) as store:
        content_id = await store.content_id(model().draft())
        for step in steps:
            try:
                if step == "publish":
                    published = await store.publish(model().draft(), source_id="source")
                    print("published", published.generation, published.was_present)
                elif step == "lease":
                    lease = await store.lease(content_id)
                    print("lease", lease and lease.generation)
                    if lease:
                        lease.close()
                elif step == "verify":
                    lease = await store.lease(content_id)
                    with lease:
                        await store.verify(lease)
                elif step == "evict":
                    print("evicted", len(await store.evict(EvictionPolicy(max_bytes=0))))
                elif step == "damage":
                    path = f"{root}/entries/{content_id}/g1/weights-00001.safetensors"
                    os.chmod(path, 0o644)
                    with open(path, "r+b") as file:
                        file.seek(65536 + 9)
                        file.write(b"damage")
                    os.chmod(path, 0o444)
            except EntryRejectedError as rejected:
                print("rejected", rejected.disposition)
            except StoreError as error:
                print(type(error).__name__)
anyio.run(main)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user reaches."""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def as_user(user: int, root: Path, steps: str, changes: str = "{}") -> list[str]:
    """What the steps printed, done by that user."""
    command = [sys.executable, "-c", PROGRAM, str(root), str(user), steps, changes]
    folder = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_owner_without_roots_rights_quarantines_rebuilds_and_removes_hardened_entries(shared: Path) -> None:
    root = shared / "store"
    assert as_user(NOBODY, root, "publish lease damage verify lease publish lease evict") == [
        "published 1 False",
        "lease 1",
        "rejected quarantined",
        "lease None",
        "published 2 False",
        "lease 2",
        "evicted 2",
    ]
    assert {path for path in tree(root) if path.startswith(("entries/", "quarantine/", "tmp/", "sources/"))} == set()


@needs_root
def test_a_stranger_denies_what_it_cannot_move_and_rebuilds_beside_it(shared: Path) -> None:
    """Two users share a root: the second may not move the first one's read-only folder, but marks it for everybody."""
    root = shared / "store"
    modes = '{"dir_mode": 511, "file_mode": 438}'  # 0o777, 0o666: open to all
    assert as_user(NOBODY, root, "publish damage", modes) == ["published 1 False"]
    assert as_user(SOMEBODY, root, "verify lease publish lease evict", modes) == [
        "rejected denied",
        "lease None",
        "published 2 False",
        "lease 2",
        "evicted 1",
    ]
    assert as_user(NOBODY, root, "lease publish lease", modes) == ["lease None", "published 2 False", "lease 2"]
    assert as_user(NOBODY, root, "evict", modes) == ["evicted 2"]


@needs_root
def test_a_stranger_may_not_use_a_store_that_is_not_shared(shared: Path) -> None:
    root = shared / "store"
    assert as_user(NOBODY, root, "publish") == ["published 1 False"]
    with pytest.raises(AssertionError, match=r"RootRefusedError.*belongs to the user 65534"):
        as_user(SOMEBODY, root, "lease")


@needs_root
def test_a_store_of_root_is_read_by_others_but_not_written(shared: Path) -> None:
    root = shared / "store"
    anyio.run(publish, root)
    assert as_user(NOBODY, root, "lease publish evict") == ["lease 1", "StoreOperationError", "evicted 0"]
    assert as_user(0, root, "lease verify") == ["lease 1"]
