"""The probe against scripted children: one that answers, hangs, dies, talks nonsense, or does not go when killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from streamflow.stages.registration import probe as module
from streamflow.stages.registration.probe import Verdict, Verdicts, probe

pytestmark = pytest.mark.anyio

#: More than any child here needs that ends by itself.
PATIENCE_S = 60.0


def child(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", f"import os, sys, time, signal\n{code}", *map(str, arguments)]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('{"problem": null, "is_conclusive": true}', Verdict(None)),
        ('{"problem": "no", "is_conclusive": true}', Verdict("no")),
        ('{"problem": "exclusive", "is_conclusive": false}', Verdict("exclusive", is_conclusive=False)),
    ],
)
async def test_an_answer_is_the_verdict(answer: str, verdict: Verdict) -> None:
    assert await probe(child("print(sys.argv[1])", answer), PATIENCE_S) == verdict


async def test_an_answer_counts_although_the_child_hangs_after_it() -> None:
    code = 'print(\'{"problem": null, "is_conclusive": true}\', flush=True)\ntime.sleep(1000)'
    assert await probe(child(code), PATIENCE_S) == Verdict(None)


@pytest.mark.parametrize(
    "answer",
    [
        "registered",
        "[]",
        "{}",
        "null",
        '{"problem": 1, "is_conclusive": true}',
        '{"problem": null, "is_conclusive": 1}',
    ],
)
async def test_nonsense_is_no_answer(answer: str) -> None:
    verdict = await probe(child("print(sys.argv[1])", answer), PATIENCE_S)
    assert verdict.problem == f"the probe gave an answer that is none: {answer.encode()!r}"


async def test_endless_nonsense_is_not_read_for_ever() -> None:
    verdict = await probe(child("while True: sys.stdout.write('x' * 10000)"), PATIENCE_S)
    assert verdict.problem is not None
    assert "an answer that is none" in verdict.problem


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("sys.exit(3)", "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("print('half', end='')", "exit status 0"),
    ],
)
async def test_a_child_that_dies_is_told_with_its_end(code: str, how: str) -> None:
    assert await probe(child(code), PATIENCE_S) == Verdict(f"the probe ended without an answer ({how})")


async def test_a_program_that_is_not_there_is_inconclusive() -> None:
    verdict = await probe(["./no/such/program"], PATIENCE_S)
    assert verdict.problem is not None
    assert verdict.problem.startswith("the probe could not be started")
    assert not verdict.is_conclusive


HANGS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(1000)
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_child_that_hangs_is_killed_at_the_deadline(tmp_path: Path) -> None:
    verdict = await probe(child(HANGS, tmp_path / "pid"), 1.0)
    assert verdict.problem == "the probe did not answer within 1 s: registering such a mapping may never return"
    assert verdict.is_conclusive
    assert not is_running(int((tmp_path / "pid").read_text()))


async def test_a_cancelled_probe_kills_its_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    async def cancel_when_it_runs(scope: anyio.CancelScope) -> None:
        while not (pid.exists() and pid.read_text()):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_when_it_runs, tasks.cancel_scope)
            await probe(child(HANGS, pid), PATIENCE_S)
    assert tasks.cancel_scope.cancelled_caught
    assert not is_running(int(pid.read_text()))


class Immortal:
    """A process that a signal does not end: it sits in the kernel."""

    returncode: int | None = None

    def __init__(self) -> None:
        self.stdout = self
        self.num_kills = 0
        self.closed = False

    def kill(self) -> None:
        self.num_kills += 1

    async def wait(self) -> int:
        await anyio.sleep_forever()
        raise AssertionError

    def __aiter__(self) -> Immortal:
        return self

    async def __anext__(self) -> bytes:
        await anyio.sleep_forever()
        raise AssertionError

    async def aclose(self) -> None:
        self.closed = True


async def test_a_child_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Immortal()

    async def open_process(command: Any, **options: Any) -> Immortal:
        assert options["stdin"] == options["stderr"] == subprocess.DEVNULL
        return process

    monkeypatch.setattr(anyio, "open_process", open_process)
    monkeypatch.setattr(module, "KILL_GRACE_S", 0.01)
    monkeypatch.setattr(module, "_ABANDONED", abandoned := [])
    with anyio.fail_after(PATIENCE_S):
        verdict = await probe(["driver"], 0.01)
    assert verdict.problem is not None
    assert "did not answer within 0.01 s" in verdict.problem
    assert process.num_kills == 1
    assert process.closed
    assert abandoned == [process]


async def test_verdicts_are_kept_by_kind_unless_they_are_inconclusive() -> None:
    asked: list[str] = []
    answers = {"good": Verdict(None), "bad": Verdict("hangs"), "unsure": Verdict("exclusive", is_conclusive=False)}
    verdicts = Verdicts()

    async def of(kind: str) -> Verdict:
        async def ask() -> Verdict:
            asked.append(kind)
            return answers[kind]

        return await verdicts.of(kind, ask)

    for _ in range(3):
        assert {kind: await of(kind) for kind in answers} == answers
    assert asked == ["good", "bad", "unsure", "unsure", "unsure"]
