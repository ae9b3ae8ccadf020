"""What a fork may do with an offload of its parent's: nothing, and it waits for nothing.

No child computes here: MKL spins for ever in a child whose parent has multiplied matrices in other threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable

import anyio
import pytest

import streamflow
from streamflow.errors import ForkedOffloadError
from tests.streamflow.runtime.kit import PATIENCE_S, make_subject

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.timeout(4 * PATIENCE_S),
]


def in_fork(child: Callable[[], object]) -> None:
    """Call ``child`` in a forked process. Fails if it raises there, or does not return."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that other threads run is what is tested
        pid = os.fork()
    if not pid:
        status = 1
        try:
            child()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert exit_status(pid) == 0, "see what the child has written"


def exit_status(pid: int) -> int:
    """How the child ended; it is killed if it does not."""
    deadline = time.monotonic() + PATIENCE_S
    pause = 0.001
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return os.waitstatus_to_exitcode(ended[1])


def refused(use: Callable[[], object]) -> None:
    with pytest.raises(ForkedOffloadError, match="after forking") as failure:
        use()
    assert failure.value.used_by == os.getpid() != failure.value.opened_by


def test_a_fork_that_leaves_the_context_of_its_parent_waits_for_nothing() -> None:
    subject = make_subject()
    context = streamflow.offload(subject.model)
    context.__enter__()
    try:
        in_fork(lambda: refused(subject.forward))
        in_fork(lambda: context.__exit__(None, None, None))
        assert subject.forward() == subject.expected
    finally:
        context.__exit__(None, None, None)
    assert subject.forward() == subject.expected


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_fork_that_closes_what_its_parent_started_waits_for_nothing(backend: str) -> None:
    subject = make_subject()
    started = anyio.run(streamflow.start_offload, subject.model)
    try:
        in_fork(lambda: refused(lambda: anyio.run(started.run, subject.forward, backend=backend)))
        in_fork(lambda: anyio.run(started.aclose, backend=backend))
        assert anyio.run(started.run, subject.forward, backend=backend) == subject.expected
    finally:
        anyio.run(started.aclose, backend=backend)
    assert subject.forward() == subject.expected


PROGRAM = """
import os, sys, warnings
import torch, streamflow

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

warnings.simplefilter("ignore", DeprecationWarning)
network = Network()
with torch.no_grad(), streamflow.offload(network, {"device": "cpu"}):
    network(torch.ones(1, 4))
    pid = os.fork()
    if not pid:
        sys.exit(18)  # as programs end: leaving the context, then what was registered for the end
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 18
    network(torch.ones(1, 4))
print("all well")
"""


@pytest.mark.slow
def test_a_fork_ends_as_programs_do() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "all well\n"), done.stderr
