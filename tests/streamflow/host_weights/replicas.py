"""A program: replicas of one model, forked from one process that has imported torch and started nothing yet.

``race``: each opens the model through one cold store at once, and says what it got. ``fork``: one opens it and forks.
Prints JSON.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from streamflow.store.errors import StoreForkedError
from streamflow.store.lease import Lease
from tests.streamflow.host_weights.kit import CASE, Stored, report_of
from tests.streamflow.kit import resident_digests, sha256_of
from tests.streamflow.store.crash.kit import locked_files


class Gate:
    """Opened once, for all who wait."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        """Return when the gate's owner has opened it, or is gone. Forget the owner's end first."""
        os.close(self._write)
        os.read(self._read, 1)

    def open(self) -> None:
        os.close(self._write)


def forked(work: Callable[[], Any]) -> tuple[int, int]:
    """A child that runs ``work`` and writes what it returns as JSON; its pid, and where to read."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(write)
    return pid, read


def hear(read: int) -> Any:
    """What a child has said, once it has ended or closed its end."""
    with os.fdopen(read) as file:
        return json.loads(file.read())


def inodes() -> list[int]:
    """The files of weights that this process has open, by inode."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "/weights-" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
        except FileNotFoundError:
            continue
    return sorted(found)


async def replica(stored: Stored, all_open: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    async with stored.streamed("preferred") as (offload, model):
        outputs = [sha256_of(await offload.run(model, *call)) for call in CASE.calls]
        report = report_of(offload)
        told = {"outputs": outputs, "outcome": report.outcome, "generation": report.generation, "inodes": inodes()}
        await all_open()
    return told


def race(stored: Stored, count: int) -> dict[str, Any]:
    """``count`` replicas at once."""
    expected = resident_digests(CASE.build(), CASE.calls)
    gate, here = Gate(), [os.pipe() for _ in range(count)]
    children = []
    for number in range(count):

        async def all_open(number: int = number) -> None:
            os.write(here[number][1], b"x")
            for read, _ in here:
                await anyio.to_thread.run_sync(wait_readable, read)

        def run(number: int = number, all_open: Callable[[], Awaitable[None]] = all_open) -> dict[str, Any]:
            gate.wait()
            return anyio.run(replica, stored, all_open, backend=["asyncio", "trio"][number % 2])

        children.append(forked(run))
    gate.open()
    told = [hear(read) for _, read in children]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in children]
    return {"told": told, "codes": codes, "expected": expected}


def wait_readable(fd: int) -> None:
    """Return when there is something to read, which stays there."""
    select.select([fd], [], [])


async def fork_after_open(stored: Stored) -> dict[str, Any]:
    """A child meets a typed refusal; what the parent holds and computes stays right."""
    expected = resident_digests(CASE.build(), CASE.calls)
    async with stored.streamed("preferred") as (offload, model):
        lease = next(found for found in gc.get_objects() if isinstance(found, Lease) and not found.closed)

        def child() -> str:
            try:
                lease.fill(0, memoryview(bytearray(8)), 0)
            except StoreForkedError as refusal:
                lease.close()
                return type(refusal).__name__
            return "served"

        pid, read = forked(child)
        refusal = await anyio.to_thread.run_sync(hear, read)
        code = os.waitstatus_to_exitcode((await anyio.to_thread.run_sync(os.waitpid, pid, 0))[1])
        held = locked_files(stored.root)
        outputs = [sha256_of(await offload.run(model, *call)) for call in CASE.calls]
    return {
        "refusal": refusal,
        "code": code,
        "held": held,
        "left": locked_files(stored.root),
        "outputs_right": outputs == expected,
    }


if __name__ == "__main__":
    subject = Stored(Path(sys.argv[2]))
    result = race(subject, 8) if sys.argv[1] == "race" else anyio.run(fork_after_open, subject)
    sys.stdout.write(json.dumps(result))
