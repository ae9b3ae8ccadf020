"""Servers as programs of their own, on a free port of the loopback interface."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from tests.streamflow.runtime.kit import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


@attrs.define(eq=False)
class Program:
    """A server's process and its address."""

    process: subprocess.Popen[str]
    url: str

    @property
    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    @property
    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def program(log: Path, module: str, *options: str) -> Iterator[Program]:
    """``python -m module``, which says where it listens in its first line; what else it says goes to ``log``.

    It is killed in the end if it still runs then.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    command = [sys.executable, "-m", module, "--port", "0", *options]
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, cwd=log.parent, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", first)
            assert found, f"it said {first!r} first, and {log.read_text()}"
            yield Program(process, found[1])
        finally:
            process.kill()
            process.wait(PATIENCE_S)
