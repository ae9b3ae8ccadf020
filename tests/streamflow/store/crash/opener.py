"""A process that opens one source when it is told to, says what it holds, and stays until its input ends. No torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio

from tests.streamflow.store.crash.kit import find_or_publish, opened, tiny

MODEL = tiny(sizes=(512, 768, 70_000))


async def serve(root: Path) -> None:
    await anyio.to_thread.run_sync(sys.stdin.readline)
    async with opened(root, verification="size") as store:
        lease, is_published = await find_or_publish(store, MODEL)
    with lease:
        files = range(len(lease.manifest.files))
        told = {
            "published": is_published,
            "generation": lease.generation,
            "is_right": MODEL.is_in(lease),
            "inodes": [os.fstat(lease.fileno(file)).st_ino for file in files],
            "mapped": [bytes(lease.mapping(file).memory(0, 8)).hex() for file in files],
            "torch": "torch" in sys.modules,
        }
        await tell(told)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        await tell({"is_right": MODEL.is_in(lease), "generation": lease.generation})
        await anyio.to_thread.run_sync(sys.stdin.readline)


async def tell(told: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(serve, Path(sys.argv[1]), backend=sys.argv[2])
