"""What tests run in processes of their own: ``python -m tests.streamflow.store.other_process WHAT ROOT``. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable

import anyio

from streamflow.store.errors import EntryRejectedError
from tests.streamflow.store.kit import model, opened


async def replica(root: str) -> None:
    """Open one identity as replicas do: find it, or publish it under its lock. Prints what was leased, and how."""
    source_id, was_published = "source", False
    async with opened(root, publication_wait_s=60.0) as store:
        async with store.publication_lock(source_id):
            content_id = await store.content_of(source_id)
            if content_id is None:
                published = await store.publish(model().draft(), source_id=source_id)
                content_id, was_published = published.content_id, not published.was_present
        lease = await store.lease(content_id)
        assert lease is not None
        with lease:
            await store.verify(lease)
            print(content_id, lease.generation, os.fstat(lease.fileno(0)).st_ino, was_published, flush=True)
            sys.stdin.readline()


async def holder(root: str) -> None:
    """Lease the entry, say so, and look at it again once it was damaged: it must still be readable."""
    async with opened(root) as store:
        content_id = await store.content_of("source-0")
        assert content_id is not None
        lease = await store.lease(content_id)
        assert lease is not None
        with lease:
            print("leased", lease.generation, os.fstat(lease.fileno(0)).st_ino, flush=True)
            sys.stdin.readline()
            try:
                await store.verify(lease)
                print("sound", flush=True)
            except EntryRejectedError as rejected:
                print(rejected.disposition, flush=True)
            sys.stdin.readline()
            image = bytearray(8)
            lease.fill(0, memoryview(image), 0)
            print(image.hex(), os.fstat(lease.fileno(0)).st_ino, flush=True)


WHAT: dict[str, Callable[[str], Awaitable[None]]] = {"replica": replica, "holder": holder}

if __name__ == "__main__":
    assert "torch" not in sys.modules
    anyio.run(WHAT[sys.argv[1]], sys.argv[2], backend=sys.argv[3])
