"""A program: kills itself at every disk-changing operation of the store, one after the other, and looks what a next
start finds. Prints one JSON object. No torch: each process is forked before any loop or thread is there.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import attrs

from streamflow.store.content import content_id_of, sha256
from streamflow.store.errors import EntryRejectedError
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.files import FileOperations
from streamflow.store.store import HostWeightStore
from tests.streamflow.store.crash.kit import (
    SOURCE,
    Quick,
    Stepped,
    flip_a_byte,
    locked_files,
    opened,
    publish_source,
    tiny,
    unfinished,
)

MODEL = tiny(sizes=(512, 768, 16, 256, 1024, 320))
CONTENT_ID = content_id_of(MODEL.images, [sha256(data) for data in MODEL.data])

#: Exit codes of a start that found the entry, had to make it again, met damage, or failed.
HIT, REBUILT, REJECTED, FAILED = 10, 11, 12, 13
FOUND = {HIT: "hit", REBUILT: "rebuilt", REJECTED: "rejected"}
Work = Callable[[Path, FileOperations], Awaitable[object]]


async def publish(root: Path, files: FileOperations) -> None:
    async with opened(root, files) as store:
        (await publish_source(store, MODEL)).close()


async def publish_known(root: Path, files: FileOperations) -> None:
    async with opened(root, files) as store:
        await store.publish(MODEL.draft(), source_id=SOURCE, content_id=CONTENT_ID)


async def evict(root: Path, files: FileOperations) -> None:
    async with opened(root, files) as store:
        assert await store.evict(EvictionPolicy(max_bytes=0))


async def prepare_nothing(root: Path, files: FileOperations) -> None:
    pass


async def prepare_damaged(root: Path, files: FileOperations) -> None:
    """A damaged entry, and what a writer left that died long ago."""
    await publish(root, files)
    flip_a_byte(root)
    left = root / "tmp" / "0123456789abcdef"
    left.mkdir()
    (left / "weights-00001.safetensors").write_bytes(bytes(4096))
    left.chmod(0o555)
    (root / "tmp" / "fedcba9876543210").write_bytes(b"half a record")


@attrs.frozen
class Scenario:
    """What is there, and what is done to it until the kill. ``damaged``: an entry may be rejected afterwards."""

    prepare: Work
    work: Work
    damaged: bool = False


SCENARIOS = {
    "cold": Scenario(prepare_nothing, publish),
    "rebuild": Scenario(prepare_damaged, publish_known, damaged=True),
    "evict": Scenario(publish, evict),
}


def in_child(work: Work, root: Path, files: FileOperations, backend: str) -> int:
    """Run ``work`` in a fork; its exit code, or minus the number of the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            result = anyio.run(work, root, files, backend=backend)
            code = result if isinstance(result, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(point: Point) -> Stepped:
    """Operations of which this one is never made; or half of it, where it is ``torn``."""

    def before(number: int, operation: str, arguments: tuple[Any, ...]) -> None:
        if number == point.number:
            if point.torn:
                fd, data, offset = arguments
                os.pwrite(fd, data[: data.nbytes // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)

    return Stepped(before)


async def start_again(root: Path, files: FileOperations) -> int:
    """What a next start finds. Another publication after it has removed every trace of the dead one."""
    if held := locked_files(root):
        raise AssertionError(f"still locked: {held}")
    async with opened(root) as store:
        found = await look_up(store)
        if found != HIT:
            async with store.publication_lock(SOURCE):
                await store.publish(MODEL.draft(), source_id=SOURCE)
            check(await look_up(store) == HIT, "what was just published is not there")
        await store.publish(tiny(seed=2, sizes=(32,)).draft(), source_id=None)
    if left := unfinished(root):
        raise AssertionError(f"the next publication left the dead one's {left}")
    return found


async def look_up(store: HostWeightStore) -> int:
    content_id = await store.content_of(SOURCE)
    try:
        lease = None if content_id is None else await store.lease(content_id)
    except EntryRejectedError:
        return REJECTED
    if lease is None:
        return REBUILT
    with lease:
        check(MODEL.is_in(lease), "wrong bytes")
    return HIT


@attrs.frozen
class Point:
    """A moment of a scenario: ahead of the operation of this number, or half through it."""

    number: int
    operation: str
    torn: bool = False


def points_of(folder: Path, scenario: Scenario, backend: str) -> list[Point]:
    """Every moment at which the scenario may be killed: it is run once to the end."""
    counted = folder / "operations"
    with counted.open("w") as file:
        logged = Stepped(lambda number, operation, arguments: print(operation, file=file, flush=True))
        check(in_child(scenario.work, fresh_root(folder), logged, backend) == 0, "the scenario failed")
    operations = counted.read_text().split()
    points = [Point(number, operation) for number, operation in enumerate(operations)]
    return points + [attrs.evolve(point, torn=True) for point in points if point.operation == "pwrite"]


def fresh_root(folder: Path) -> Path:
    """The scenario's beginning, to be changed."""
    root = folder / "store"
    if root.exists():
        shutil.rmtree(root)
    if (folder / "base").exists():
        shutil.copytree(folder / "base", root)
    return root


def kill_and_start(folder: Path, scenario: Scenario, point: Point, backend: str) -> str:
    """What a start finds after a kill at this point."""
    root = fresh_root(folder)
    ended = in_child(scenario.work, root, killed_at(point), backend)
    check(ended == -signal.SIGKILL, f"{point} was never reached: {ended}")
    found = in_child(start_again, root, Quick(), backend)
    check(found in FOUND and (found != REJECTED or scenario.damaged), f"after {point} a start ended with {found}")
    return FOUND[found]


def check(is_so: bool, what: str) -> None:
    """:raises AssertionError: unless it is so."""
    if not is_so:
        raise AssertionError(what)


def main(folder: Path, name: str, backends: list[str]) -> None:
    """Kill at every point, under the event loops in turn; what each point led to."""
    scenario = SCENARIOS[name]
    for backend in backends:  # before forking: every child would import it again
        importlib.import_module(backend)
        importlib.import_module(f"anyio._backends._{backend}")
    gc.freeze()
    check(in_child(scenario.prepare, folder / "base", Quick(), backends[0]) == 0, "could not be prepared")
    outcomes = []
    for point, backend in zip(points_of(folder, scenario, backends[0]), itertools.cycle(backends)):
        outcomes.append([point.operation, point.torn, kill_and_start(folder, scenario, point, backend)])
    sys.stdout.write(json.dumps({"outcomes": outcomes, "torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
