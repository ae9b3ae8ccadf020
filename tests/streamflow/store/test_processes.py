"""Several processes and one store: one entry, the same pages, and nobody in the other's way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from streamflow.store.packing import file_name
from tests.streamflow.store.kit import model, opened, publish, tree, unfinished

ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def process(what: str, root: Path, backend: str = "asyncio") -> Iterator[subprocess.Popen[str]]:
    """A process of `other_process`; killed at the end if it is still there."""
    command = [sys.executable, "-m", "tests.streamflow.store.other_process", what, str(root), backend]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def said(started: subprocess.Popen[str]) -> list[str]:
    assert started.stdout is not None
    return started.stdout.readline().split()


def go_on(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


@pytest.mark.slow
def test_eight_processes_that_open_a_cold_identity_publish_it_once_and_share_its_pages(root: Path) -> None:
    with ExitStack() as stack:
        replicas = [stack.enter_context(process("replica", root, ("asyncio", "trio")[n % 2])) for n in range(8)]
        found = [said(replica) for replica in replicas]
        assert [published for _, _, _, published in found].count("True") == 1
        assert len({tuple(seen[:3]) for seen in found}) == 1
        for replica in replicas:
            go_on(replica)
        assert [replica.wait(60) for replica in replicas] == [0] * 8
    assert unfinished(root) == []
    assert len([path for path in tree(root) if path.endswith(".safetensors")]) == 1


@pytest.mark.anyio
async def test_a_damaged_generation_is_rebuilt_while_two_processes_hold_it(root: Path) -> None:
    content_id = await publish(root)
    with process("holder", root, "trio") as one, process("holder", root) as two:
        leased = [said(one), said(two)]
        assert leased[0] == leased[1]
        assert leased[0][:2] == ["leased", "1"]
        file = root / "entries" / content_id / "g1" / file_name(0)
        file.chmod(0o644)
        with file.open("r+b") as data:
            data.seek(65_536 + 5000)
            data.write(b"damage")
        for holder, disposition in ((one, "quarantined"), (two, "gone")):
            go_on(holder)
            assert said(holder) == [disposition]
        async with opened(root, verification="digest") as store:
            again = await store.publish(model().draft(), source_id="source-0")
            assert (again.content_id, again.generation, again.was_present) == (content_id, 2, False)
            lease = await store.lease(content_id)
            assert lease is not None
            with lease:
                assert str(os.fstat(lease.fileno(0)).st_ino) != leased[0][2]
        for holder in (one, two):
            go_on(holder)
            assert said(holder) == [model().data[0][:8].hex(), leased[0][2]]
            assert holder.wait(60) == 0


@pytest.mark.anyio
async def test_a_killed_process_holds_no_lease(root: Path) -> None:
    from streamflow.store.eviction_policy import EvictionPolicy

    content_id = await publish(root)
    async with opened(root) as store:
        with process("holder", root) as holder:
            assert said(holder)[0] == "leased"
            assert await store.evict(EvictionPolicy(max_bytes=0)) == ()
        assert [found.content_id for found in await store.evict(EvictionPolicy(max_bytes=0))] == [content_id]
