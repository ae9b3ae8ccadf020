"""Ranks in processes of their own, forked from the one that runs the tests: bounded in time, and none is left behind.

::

    def work(rank: Rank) -> object:
        group = rank.join(timeout_s=2)      # torch.distributed over gloo, on the loopback interface
        rank.say("joined")
        ...
        return "what the test looks at"

    with forked_ranks(3, work) as ranks:
        ranks.wait_for("joined", of=1)
        ranks.kill(1)                       # or `stop`, `go_on`
        answers = ranks.answers(of=(0, 2))  # the others' failures are failures of the test

``work`` may be a closure; what it says and returns is pickled. Tests that use it are not async: a child must not
inherit a running event loop, but may run one of its own.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import attrs
import torch.distributed as dist

#: How long the ranks of a test may take together, unless it says otherwise.
PATIENCE_S = 40.0
#: What a child still gets after that, should the parent be gone: then it ends itself.
GRACE_S = 10


@attrs.frozen
class Rank:
    """What a child knows: which rank it is, of how many, and where its group meets."""

    rank: int
    size: int
    folder: Path
    _pipe: Connection

    def say(self, message: object) -> None:
        """Tell the test ``message``."""
        self._pipe.send(("said", message))

    def join(self, *, timeout_s: float = PATIENCE_S) -> dist.ProcessGroup:
        """The group of all ranks: gloo, whose collectives give up after ``timeout_s``. Returns once all have joined."""
        store = dist.FileStore(str(self.folder / "store"), self.size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=timeout_s)
        )
        self.meet("joined")
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def meet(self, name: str) -> None:
        """Return once every rank has come to ``name``. Blocks.

        No collective: of that, one rank could be done, and end, while another is not connected to it yet.
        """
        (self.folder / f"{name}-{self.rank}").touch()
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(self.size)):
            time.sleep(0.002)


@attrs.define
class _Child:
    rank: int
    pid: int
    pipe: Connection
    said: list[object] = attrs.field(factory=list)
    ended: tuple[Literal["returned", "raised", "died"], Any] | None = None

    def hear(self) -> None:
        """Take one message, or note that there will be none any more."""
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            self.ended = self.ended or ("died", None)
            return
        if kind == "said":
            self.said.append(value)
        else:
            self.ended = (kind, value)


class ForkedRanks:
    """The children, as their test sees them. Made by `forked_ranks`."""

    def __init__(self, children: Sequence[_Child], ends_at: float) -> None:
        self._children = children
        self._ends_at = ends_at

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [child.pid for child in self._children]

    def wait_for(self, message: object, *, of: int) -> None:
        """Return once rank ``of`` has said ``message``."""
        child = self._children[of]
        self._hear_until(lambda: message in child.said or child.ended is not None)
        assert message in child.said, f"rank {of} did not say {message!r}: {_how(child)}"

    def answers(self, *, of: Collection[int] | None = None) -> list[Any]:
        """What the ranks returned (None: of all), once they have ended; a rank that raised fails the test."""
        wanted = [child for child in self._children if of is None or child.rank in of]
        self._hear_until(lambda: all(child.ended is not None for child in wanted))
        wrong = [f"rank {child.rank} {_how(child)}" for child in wanted if _kind(child) != "returned"]
        assert not wrong, "\n".join(wrong)
        return [child.ended[1] for child in wanted if child.ended is not None]

    def said(self, of: int) -> list[object]:
        """What rank ``of`` has said so far."""
        self._hear_until(lambda: True)
        return list(self._children[of].said)

    def kill(self, rank: int) -> None:
        """End it at once, whatever it is doing."""
        os.kill(self._children[rank].pid, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """Let it stand still; its connections stay open."""
        os.kill(self._children[rank].pid, signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        """Let it go on after `stop`."""
        os.kill(self._children[rank].pid, signal.SIGCONT)

    def _hear_until(self, done: Callable[[], bool]) -> None:
        while True:
            pipes = {child.pipe: child for child in self._children if child.ended is None}
            ready = wait(list(pipes), timeout=0)
            while not ready:
                if done():
                    return
                left = self._ends_at - time.monotonic()
                if left <= 0 or not pipes:
                    self._show_stacks()
                    raise AssertionError(f"not done in time; {[f'rank {c.rank} {_how(c)}' for c in self._children]}")
                ready = wait(list(pipes), timeout=left)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                pipes[pipe].hear()

    def _show_stacks(self) -> None:
        for child in self._children:
            if child.ended is None:
                os.kill(child.pid, signal.SIGUSR1)
        time.sleep(0.2)  # for them to be written


def _kind(child: _Child) -> str:
    return "is still running" if child.ended is None else child.ended[0]


def _how(child: _Child) -> str:
    value = "" if child.ended is None or child.ended[1] is None else f": {child.ended[1]}"
    return f"{_kind(child)}{value} (it said {child.said})"


@contextmanager
def forked_ranks(size: int, work: Callable[[Rank], object], *, patience_s: float = PATIENCE_S) -> Iterator[ForkedRanks]:
    """``size`` children that each run ``work``; leaving kills those that still run, and waits for all."""
    children: list[_Child] = []
    with TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(size):
                children.append(_fork(rank, size, Path(folder), work, patience_s))
            yield ForkedRanks(children, time.monotonic() + patience_s)
        finally:
            for child in children:
                os.kill(child.pid, signal.SIGKILL)  # until it is waited for, the id is the child's
            for child in children:
                os.waitpid(child.pid, 0)
                child.pipe.close()


def run_ranks(size: int, work: Callable[[Rank], object], *, patience_s: float = PATIENCE_S) -> list[Any]:
    """What ``work`` returned in each of ``size`` ranks."""
    with forked_ranks(size, work, patience_s=patience_s) as ranks:
        return ranks.answers()


def _fork(rank: int, size: int, folder: Path, work: Callable[[Rank], object], patience_s: float) -> _Child:
    receiving, sending = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of the tests' process hold nothing we use
        pid = os.fork()
    if pid:
        sending.close()
        return _Child(rank, pid, receiving)
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(patience_s) + GRACE_S)
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        sending.send(("returned", work(Rank(rank, size, folder, sending))))
    except BaseException:
        sending.send(("raised", traceback.format_exc()))
    finally:
        os._exit(0)
