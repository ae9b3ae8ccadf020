"""A probe of host registration that cannot hang this process: a child process tries it first.

Registering some kinds of mappings never returns, and a thread inside such a call cannot be ended. The child answers in
one line of JSON: ``{"problem": null or a text, "is_conclusive": true or false}``.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress

import anyio
import anyio.abc
import attrs

#: An answer is shorter.
MAX_ANSWER_BYTES = 64 << 10
#: How long a killed child may take to go.
KILL_GRACE_S = 2.0

#: Children that could not be killed: nobody may wait for them, and dropping them would be told as a fault.
_ABANDONED: list[anyio.abc.Process] = []


@attrs.frozen
class Verdict:
    """What a probe found. ``problem``: what stands against registering; None if nothing does.

    ``is_conclusive``: whether asking again would give the same answer.
    """

    problem: str | None
    is_conclusive: bool = True


class Verdicts:
    """Verdicts by kind of mapping. Those that are conclusive are kept as long as the object lives."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Verdict] = {}

    async def of(self, kind: Hashable, ask: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """The verdict on ``kind``; ``ask`` finds it where none is kept."""
        kept = self._kept.get(kind)
        if kept is not None:
            return kept
        verdict = await ask()
        if verdict.is_conclusive:
            self._kept[kind] = verdict
        return verdict


#: Those of this process.
VERDICTS = Verdicts()


async def probe(command: Sequence[str], deadline_s: float) -> Verdict:
    """The answer of the program ``command``, or what became of it if it has none after ``deadline_s`` seconds.

    Whatever happens, and when this is cancelled, too, the child is killed; one that does not go is left behind.
    """
    try:
        process = await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as failure:
        return Verdict(f"the probe could not be started: {failure}", is_conclusive=False)
    try:
        with anyio.move_on_after(deadline_s):
            return await _answer_of(process)
        return Verdict(f"the probe did not answer within {deadline_s:g} s: registering such a mapping may never return")
    finally:
        await _end(process)


async def _answer_of(process: anyio.abc.Process) -> Verdict:
    line = await _first_line(process)
    if line is None:
        return Verdict(f"the probe ended without an answer ({_how_it_ended(await process.wait())})")
    try:
        answer = json.loads(line)
        problem, is_conclusive = answer["problem"], answer["is_conclusive"]
    except (ValueError, TypeError, KeyError):
        return Verdict(f"the probe gave an answer that is none: {line[:80]!r}")
    if not (problem is None or isinstance(problem, str)) or not isinstance(is_conclusive, bool):
        return Verdict(f"the probe gave an answer that is none: {line[:80]!r}")
    return Verdict(problem, is_conclusive)


async def _first_line(process: anyio.abc.Process) -> bytes | None:
    """What the child writes, up to the end of a line or `MAX_ANSWER_BYTES`; None if it writes nothing whole."""
    if process.stdout is None:
        raise TypeError("the probe's output is not piped")
    found = b""
    async for part in process.stdout:
        found += part
        if b"\n" in found or len(found) > MAX_ANSWER_BYTES:
            return found.partition(b"\n")[0]
    return None


def _how_it_ended(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


async def _end(process: anyio.abc.Process) -> None:
    with anyio.CancelScope(shield=True):
        with suppress(ProcessLookupError):
            process.kill()
        with anyio.move_on_after(KILL_GRACE_S):
            await process.wait()
        if process.returncode is not None:
            await process.aclose()
            return
        _ABANDONED.append(process)
        if process.stdout is not None:
            await process.stdout.aclose()
