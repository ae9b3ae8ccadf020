"""What a start must find on every disk that a stopped machine may leave, and the work that is stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import attrs

from streamflow.store.content import content_id_of, sha256
from streamflow.store.errors import EntryRejectedError, StoreError
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.files import FileOperations
from streamflow.store.store import HostWeightStore
from tests.streamflow.store.crash.disk import Disk, Name, Operation, Stopped, Sync, Tree, Unsynced, tree_of
from tests.streamflow.store.crash.kit import SOURCE, Tiny, opened, publish_source, tiny, unfinished
from tests.streamflow.store.crash.recording import Recorder, put

MODEL = tiny()
ROOT = Path("cache", "store")
HARDENED = 0o555
Work = Callable[[Path, FileOperations], Awaitable[object]]


def content_id(model: Tiny) -> str:
    return content_id_of(model.images, [sha256(data) for data in model.data])


async def publish(root: Path, files: FileOperations) -> None:
    async with opened(root, files) as store:
        (await publish_source(store, MODEL)).close()


async def publish_other(root: Path, files: FileOperations) -> None:
    async with opened(root, files) as store:
        (await publish_source(store, tiny(seed=1), "other")).close()


async def publish_known(root: Path, files: FileOperations) -> None:
    async with opened(root, files) as store:
        await store.publish(MODEL.draft(), source_id=SOURCE, content_id=content_id(MODEL))


async def publish_truncated(root: Path, files: FileOperations) -> None:
    await publish(root, files)
    for path in root.glob("entries/*/*/weights-00002*"):
        os.truncate(path, path.stat().st_size - 1)


async def evict(root: Path, files: FileOperations) -> None:
    async with opened(root, files) as store:
        assert await store.evict(EvictionPolicy(max_bytes=0))


async def quarantine(root: Path, files: FileOperations) -> None:
    async with opened(root, files) as store:
        await store.quarantine(content_id(MODEL), 1, "it looks wrong")


async def nothing(root: Path, files: FileOperations) -> None:
    pass


@attrs.frozen
class Scenario:
    """What was there, what was done, and what that has led to once it is done: the model's entry is ``there``,
    ``gone``, or put ``aside``. ``was_damaged``: its first generation may be rejected;
    ``is_hardened``: its folder has no write permission.
    """

    prepare: Work
    work: Work
    leads_to: Literal["there", "gone", "aside"]
    was_damaged: bool = False
    is_hardened: bool = True
    refuse: Callable[[str], object] = lambda operation: None


async def record(folder: Path, scenario: Scenario) -> Recorder:
    """Everything that the scenario asks of the disk."""
    base = folder / "disk"
    base.mkdir()
    await scenario.prepare(base / ROOT, FileOperations())
    recorder = Recorder(base, scenario.refuse)
    await scenario.work(base / ROOT, recorder)
    return recorder


class _Killed(BaseException):
    """The process is not there any more."""


async def record_after_a_kill(folder: Path, at: int) -> tuple[Recorder, int] | None:
    """What a process asks of the disk that publishes after another one was killed at its operation of this number, and
    where in the log it begins; None: the other one had not so many.

    The dead one's operations may not have reached the disk: what it made is found all the same.
    """
    base = folder / "disk"
    base.mkdir()
    operations: list[str] = []

    def die(operation: str) -> None:
        operations.append(operation)
        if len(operations) > at:
            raise _Killed

    recorder = Recorder(base, die)
    try:
        await publish(base / ROOT, recorder)
    except _Killed:
        recorder.refuse = lambda operation: None
        begins = len(recorder.log)
        await publish_known(base / ROOT, recorder)
        return recorder, begins
    return None


@attrs.frozen
class Replayed:
    """A state with something wrong: what, and after how many operations everything stopped."""

    problem: str
    stopped_after: int


class Replay:
    """Judges the states that a log may lead to; each that looks the same to a start once."""

    def __init__(self, folder: Path, before: Disk, scenario: Scenario, seed: int = 0) -> None:
        self._folder, self._before, self._scenario = folder, before, scenario
        self._chance = random.Random(seed)
        self._judged: dict[tuple[Tree, bool], str | None] = {}

    @property
    def num_judged(self) -> int:
        """How many different states were judged."""
        return len(self._judged)

    async def first_problem(self, log: Sequence[Operation], since: int = 0) -> Replayed | None:
        """The first state with something wrong, if the machine stops after ``since`` operations or later."""
        for stopped_after, state in self.states(log, since):
            problem = await self.problem_of(state, is_done=stopped_after == len(log))
            if problem is not None:
                return Replayed(problem, stopped_after)
        return None

    def states(self, log: Sequence[Operation], since: int = 0) -> Iterator[tuple[int, Stopped]]:
        """Every state, after every number of operations from ``since`` on."""
        unsynced = Unsynced(self._before)
        for stopped_after in range(len(log) + 1):
            if stopped_after >= since:
                for state in unsynced.states(_matters, self._chance):
                    yield stopped_after, state
            if stopped_after < len(log):
                unsynced.add(log[stopped_after])

    async def problem_of(self, state: Stopped, *, is_done: bool) -> str | None:
        """What is wrong with a state; None: nothing."""
        if is_done and (misnamed := state.misnamed_folder(self._before)) is not None:
            return misnamed
        tree = tree_of(state.disk)
        key = (_outline(tree), is_done)
        if key not in self._judged:
            self._judged[key] = await self._judge(tree, is_done=is_done)
        return self._judged[key]

    async def _judge(self, tree: Tree, *, is_done: bool) -> str | None:
        disk = self._folder / "replayed"
        put(tree, disk)
        try:
            return look(disk / ROOT) or await start(disk / ROOT, self._scenario, is_done=is_done)
        except StoreError as failure:
            return f"a start fails: {failure!r}"
        finally:
            shutil.rmtree(disk)


def _matters(path: str) -> bool:
    """What is in ``tmp/`` is removed unread, and lock files are made where there are none."""
    parts = Path(path).relative_to("/", ROOT).parts if path.startswith(f"/{ROOT}/") else ()
    return parts[:1] != ("locks",) and (parts[:1] != ("tmp",) or len(parts) < 2)


def _outline(tree: Tree, path: str = "") -> Tree:
    """The tree, without the contents that do not matter."""
    kind, mode, content = tree
    if not _matters(path):
        return (kind, mode, b"")
    if isinstance(content, bytes):
        return (kind, mode, content)
    return (kind, mode, tuple((name, _outline(child, f"{path}/{name}")) for name, child in content))


def look(root: Path) -> str | None:
    """What is wrong with the files as they are; None: nothing."""
    if any(root.glob("entries/*/g*")) and not (root / "store.json").exists():
        return "there are entries, and nothing says of which format"
    return None


def wrong_modes(root: Path) -> list[str]:
    """Files of entries that others may not read, or somebody may write."""
    files = root.glob("entries/*/g*/*")
    return [f"{file.name}: {file.stat().st_mode:#o}" for file in files if stat.S_IMODE(file.stat().st_mode) != 0o444]


async def start(root: Path, scenario: Scenario, *, is_done: bool) -> str | None:
    """What is wrong with what a start finds, and with the next publication; None: nothing."""
    aside = [path for path in root.glob("quarantine/*") if (path / "manifest.json").exists()]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.glob("entries/*/g*")}
    unreadable = wrong_modes(root)
    reports = [path for path in aside if _is_readable(path.with_name(f"{path.name}.json"))]
    async with opened(root, verification="size") as store:
        found = await find(store, scenario)
        if found.problem is not None:
            return found.problem
        if unreadable:
            return f"not hardened: {unreadable}"
        if is_done and scenario.leads_to == "there":
            if not (found.is_there and found.is_known):
                return "what was published is lost"
            if scenario.is_hardened and modes != {HARDENED}:
                return "what was published is not hardened"
        if is_done and scenario.leads_to != "there" and found.is_there:
            return "what was taken away is back"
        if is_done and scenario.leads_to == "aside" and len(aside) != 1:
            return "what was put aside is lost"
        if is_done and scenario.leads_to == "aside" and len(reports) != (scenario.refuse is not refuse_reports):
            return "the report of what was put aside is lost"
        return await publish_again(store, root)


def refuse_reports(operation: str) -> None:
    """A disk with room for names only."""
    if operation == "pwrite":
        raise OSError(28, "No space left on device")


def _is_readable(report: Path) -> bool:
    with suppress(FileNotFoundError, ValueError):
        return "reason" in json.loads(report.read_bytes())
    return False


@attrs.frozen
class Found:
    """What a start finds: the entry, and that its source is known."""

    is_there: bool = False
    is_known: bool = False
    problem: str | None = None


async def find(store: HostWeightStore, scenario: Scenario) -> Found:
    """What the default verification serves has to be right: it looks at digests only later."""
    is_known = await store.content_of(SOURCE) == content_id(MODEL)
    try:
        lease = await store.lease(content_id(MODEL))
    except EntryRejectedError as failure:
        if scenario.was_damaged and failure.generation == 1:
            return Found(is_known=is_known)
        return Found(problem=f"a damaged entry is in place: {failure.reason}")
    if lease is None:
        return Found(is_known=is_known)
    with lease:
        return Found(True, is_known, None if MODEL.is_in(lease) else "an entry has wrong bytes")


async def publish_again(store: HostWeightStore, root: Path) -> str | None:
    """What is wrong with a publication after the start; None: nothing."""
    await store.publish(MODEL.draft(), source_id=SOURCE)
    lease = await store.lease(content_id(MODEL))
    if lease is None:
        return "what was published again is not there"
    with lease:
        if not MODEL.is_in(lease):
            return "what was published again is wrong"
    return f"left: {unfinished(root)}" if unfinished(root) else None


def without(log: Sequence[Operation], index: int) -> list[Operation]:
    """The log without the operation of this number."""
    return [*log[:index], *log[index + 1 :]]


def after_the_next_rename(log: Sequence[Operation], index: int) -> list[Operation]:
    """The log with the operation of this number only after the next time that something got another name."""
    later = next(number for number in range(index + 1, len(log)) if _is_taken(log[number]))
    return [*log[:index], *log[index + 1 : later + 1], log[index], *log[later + 1 :]]


def _is_taken(operation: Operation) -> bool:
    """The second half of a rename, or a removal."""
    return isinstance(operation, Name) and operation.inode is None


def syncs(recorder: Recorder) -> dict[str, int]:
    """The syncs of a log, each by what it brings to the disk and the how manieth of that it is."""
    found: dict[str, int] = {}
    count: Counter[str] = Counter()
    for index, operation in enumerate(recorder.log):
        if isinstance(operation, Sync):
            what = _kind(recorder.path_of(operation.inode))
            count[what] += 1
            found[f"{what} {count[what]}"] = index
    return found


def _kind(path: str) -> str:
    """What a path is in a store, without the names that differ from run to run."""
    if not path.startswith(f"/{ROOT}/"):
        return {f"/{ROOT}": "root"}.get(path, f"above: {path}")
    parts = Path(path).relative_to("/", ROOT).parts
    if parts[0] == "entries":
        return ("entries", "entry", "generation", parts[-1])[len(parts) - 1]
    if parts[0] == "quarantine" and len(parts) > 1:
        return "report"
    return "/".join(parts)
