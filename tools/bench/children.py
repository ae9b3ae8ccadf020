"""Benchmarks that run in a process of their own: what one leaves behind, or hangs in, is not the next one's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import anyio
import anyio.abc
import attrs
from anyio.streams.buffered import BufferedByteReceiveStream

#: An answer is one line, shorter than this.
MAX_ANSWER_BYTES = 1 << 20


@attrs.frozen
class ChildAnswer:
    """What a child printed; or, where it did not, what became of it."""

    values: dict[str, Any] | None
    problem: str | None


async def ask_child(module: str, question: dict[str, Any], timeout_s: float) -> ChildAnswer:
    """The one line of JSON that ``python -m module`` prints, which gets ``question`` as JSON; errors go to our stderr.

    It is killed after ``timeout_s`` seconds, and if this is cancelled.
    """
    command = [sys.executable, "-m", module, json.dumps(question)]
    async with await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None) as process:
        with anyio.move_on_after(timeout_s):
            return await _answer_of(process)
        process.kill()
        return ChildAnswer(None, f"it was not done after {timeout_s:g} s")


async def _answer_of(process: anyio.abc.Process) -> ChildAnswer:
    if process.stdout is None:
        raise TypeError("the child's output is not piped")  # pragma: no cover - open_process pipes it
    try:
        line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", MAX_ANSWER_BYTES)
    except (anyio.IncompleteRead, anyio.DelimiterNotFound):
        return ChildAnswer(None, f"it ended without an answer, with status {await process.wait()}")
    values: dict[str, Any] = json.loads(line)
    return ChildAnswer(values, None)


def answer(values: dict[str, Any]) -> None:
    """Print ``values`` as a child's answer."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
