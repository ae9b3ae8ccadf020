"""`start_offload`: opened in one task, used from any loop, closed from another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import streamflow
from streamflow.errors import ConfigurationError
from streamflow.facade import _LoopThread
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceMemoryError, EngineClosedError
from tests.streamflow.runtime.interrupts import Gate, gated_reads
from tests.streamflow.runtime.kit import Steps, Stops, make_subject, natively, until, wait_for

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.timeout(90)]

STAGED = {"transfer": "staged", "packing_threads": 1, "resident_blocks": 1}
in_any_loop = pytest.mark.anyio


def on_a_loop(backend: str, function: Callable[[], Coroutine[Any, Any, object]]) -> Coroutine[Any, Any, object]:
    """Run ``function`` on a loop of its own, in a thread."""
    return anyio.to_thread.run_sync(lambda: anyio.run(function, backend=backend))


@in_any_loop
@pytest.mark.parametrize("closer", ["asyncio", "trio"])
async def test_two_loops_run_and_a_third_closes(closer: str) -> None:
    subject, device = make_subject(), CpuDevice()
    outputs: list[str] = []
    started = await streamflow.start_offload(subject.model, device=device)
    assert started.statistics().state == started.state == "ready"
    assert "ready" in repr(started)

    async def ask() -> None:
        for _ in range(5):
            outputs.append(await started.run(subject.forward))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(on_a_loop, "asyncio", ask)
        tasks.start_soon(on_a_loop, "trio", ask)
        tasks.start_soon(ask)
    await on_a_loop(closer, started.aclose)
    assert outputs == [subject.expected] * 15
    assert started.statistics().state == "closed"
    subject.check_restored(device)


@in_any_loop
async def test_a_direct_call_on_any_loops_thread_but_its_own_is_served() -> None:
    subject = make_subject()
    started = await streamflow.start_offload(subject.model)
    assert subject.forward() == subject.expected
    await started.aclose()


@in_any_loop
async def test_closing_again_or_at_once_returns_when_it_is_closed(stops: Stops) -> None:
    subject, device, in_block, let_go = make_subject(), CpuDevice(), threading.Event(), threading.Event()

    def stay(index: int) -> None:
        in_block.set()
        wait_for(let_go)

    async def run() -> None:
        with pytest.raises(EngineClosedError):
            await started.run(subject.forward)

    async def close() -> None:
        await started.aclose()
        assert let_go.is_set()
        assert started.state == "closed"

    started = await streamflow.start_offload(subject.model, device=device)
    subject.script.inside = stay
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(in_block)
        for _ in range(3):
            tasks.start_soon(close)
        await until(stops.told)
        let_go.set()
    await started.aclose()
    subject.check_restored(device)
    with pytest.raises(EngineClosedError):
        await started.run(subject.forward)


@in_any_loop
async def test_errors_of_opening_come_out_as_they_are() -> None:
    subject, device = make_subject(), CpuDevice(memory_limit_bytes=100)
    with pytest.raises(ConfigurationError, match="did you mean 'window_blocks'"):
        await streamflow.start_offload(subject.model, {"window_block": 1})
    with pytest.raises(DeviceMemoryError):
        await streamflow.start_offload(subject.model, device=device)
    subject.check_restored(device)


@pytest.fixture
def gate_until_stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Opening waits for a resident block, until it has been told to stop."""
    original = _LoopThread.stop
    with gated_reads() as gate:

        def stop(thread: _LoopThread) -> None:
            original(thread)
            gate.open.set()

        monkeypatch.setattr(_LoopThread, "stop", stop)
        yield gate


@in_any_loop
async def test_a_scope_cancelled_while_it_opens_leaves_nothing_open(gate_until_stopped: Gate) -> None:
    subject, device = make_subject(), CpuDevice()
    with anyio.move_on_after(0.05) as scope:
        await streamflow.start_offload(subject.model, STAGED, device=device)
        pytest.fail("it opened")
    assert scope.cancelled_caught
    assert gate_until_stopped.open.is_set()
    subject.check_restored(device)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("num_cancels", [1, 3])
@in_any_loop
async def test_a_task_cancelled_while_it_opens_leaves_nothing_open(num_cancels: int, gate_until_stopped: Gate) -> None:
    subject, device = make_subject(), CpuDevice()
    task = asyncio.create_task(streamflow.start_offload(subject.model, STAGED, device=device))
    await until(gate_until_stopped.reached)
    for _ in range(num_cancels):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    subject.check_restored(device)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@in_any_loop
async def test_a_task_cancelled_at_any_step_of_starting_leaves_nothing_open() -> None:
    subject, device = make_subject(), CpuDevice()
    uncancelled = Steps(streamflow.start_offload(subject.model, device=device), lambda number: None)
    await (await uncancelled).aclose()
    for k in range(1, uncancelled.num):  # at the last one it has been started
        assert await natively(streamflow.start_offload(subject.model, device=device), k) >= k
        subject.check_restored(device)
    assert uncancelled.num >= 3


@in_any_loop
async def test_a_cancelled_close_closes_all_the_same() -> None:
    subject, device = make_subject(), CpuDevice()
    started = await streamflow.start_offload(subject.model, device=device)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await started.aclose()
    assert started.state == "closed"
    subject.check_restored(device)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@in_any_loop
async def test_a_close_cancelled_by_its_task_closes_all_the_same() -> None:
    subject, device = make_subject(), CpuDevice()
    started = await streamflow.start_offload(subject.model, device=device)
    task = asyncio.create_task(started.aclose())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert started.state == "closed"
    subject.check_restored(device)


PROGRAM = """
import atexit, sys, threading
sys.path.append({root!r})
import anyio, streamflow
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.runtime.kit import make_subject

kept = []
opened = {{name: (make_subject(), CpuDevice()) for name in ("asyncio", "trio", "without a loop")}}

def check():
    for name, (subject, device) in opened.items():
        subject.check_restored(device)
        print(name, "closed at exit")

atexit.register(check)  # runs after what is registered later

async def start(subject, device):
    started = await streamflow.start_offload(subject.model, device=device)
    assert await started.run(subject.forward) == subject.expected

def start_without_a_loop(subject, device):
    kept.append(streamflow.offload(subject.model, device=device))
    kept[0].__enter__()
    assert subject.forward() == subject.expected

anyio.run(start, *opened["asyncio"], backend="asyncio")
anyio.run(start, *opened["trio"], backend="trio")
start_without_a_loop(*opened["without a loop"])
print("the end")
"""


def test_a_process_that_ends_without_closing_closes_and_ends() -> None:
    """However many it opened, and however."""
    code = PROGRAM.format(root=str(ROOT))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=80, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = [f"{name} closed at exit" for name in ("asyncio", "trio", "without a loop")]
    assert ended.stdout.split("\n") == ["the end", *said, ""]
    assert not ended.stderr
