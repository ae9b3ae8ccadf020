"""Programs that have a loop already, or have it in a thread, or have none: an offload lives in each of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
import torch
import trio

import streamflow
from streamflow import Offload, StartedOffload
from streamflow.errors import LoopThreadError
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.runtime.kit import PATIENCE_S, Subject, make_subject, wait_for


class LoopInAThread:
    """A program whose event loop runs in a thread: it opens an offload there and keeps it until it is told to stop."""

    def __init__(self, subject: Subject, device: CpuDevice, backend: str) -> None:
        self.opened, self.offload, self.failure = threading.Event(), None, None
        self._subject, self._device = subject, device
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, args=(backend,))

    def __enter__(self) -> Offload:
        self._thread.start()
        wait_for(self.opened)
        assert self.offload is not None, self.failure
        return self.offload

    def __exit__(self, *exc: object) -> None:
        self._stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.failure is None

    def _run(self, backend: str) -> None:
        try:
            anyio.run(self._main, backend=backend)
        except BaseException as failure:
            self.failure = failure
        finally:
            self.opened.set()

    async def _main(self) -> None:
        stop = anyio.Event()
        token: Any = anyio.lowlevel.current_token().native_token
        wake = token.run_sync_soon if hasattr(token, "run_sync_soon") else token.call_soon_threadsafe
        self._stop = lambda: wake(stop.set)
        async with streamflow.open_offload(self._subject.model, device=self._device) as self.offload:
            self.opened.set()
            await stop.wait()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_in_a_plain_thread_serves_threads_and_other_loops(backend: str) -> None:
    subject, device = make_subject(), CpuDevice()
    digests: list[str] = []

    def ask(how: str) -> None:
        if how == "directly":
            digests.append(subject.forward())
        else:
            digests.append(anyio.run(offload.run, subject.forward, backend=how))

    with LoopInAThread(subject, device, backend) as offload:
        threads = [threading.Thread(target=ask, args=(how,)) for how in ("directly", "asyncio", "trio") * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert digests == [subject.expected] * 6
    subject.check_restored(device)


class Notebook:
    """As a notebook's kernel: one asyncio loop in the main thread, and each cell is a task of its own on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def cell(self, code: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(code, PATIENCE_S))

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@pytest.fixture
def notebook() -> Any:
    notebook = Notebook()
    yield notebook
    notebook.close()


def test_cells_of_a_notebook_open_use_and_close_one_offload(notebook: Notebook) -> None:
    subject, device = make_subject(), CpuDevice()

    async def first_cell() -> StartedOffload:
        return await streamflow.start_offload(subject.model, device=device)

    async def second_cell() -> str:
        return await started.run(subject.forward)

    async def third_cell() -> str:  # a cell that does not await calls the model as ever
        return subject.forward()

    async def failing_cell() -> None:
        with torch.enable_grad():
            await started.run(subject.model, subject.inputs.clone().requires_grad_())

    async def last_cell() -> None:
        await started.aclose()

    started = notebook.cell(first_cell())
    assert notebook.cell(second_cell()) == subject.expected
    assert notebook.cell(third_cell()) == subject.expected
    with pytest.raises(streamflow.StreamflowError, match="no_grad"):
        notebook.cell(failing_cell())
    assert notebook.cell(second_cell()) == subject.expected
    assert started.statistics().engine.streamed_bytes > 0
    notebook.cell(last_cell())
    assert started.state == "closed"
    subject.check_restored(device)


def test_a_cell_that_awaits_nothing_uses_the_synchronous_form(notebook: Notebook) -> None:
    subject, device = make_subject(), CpuDevice()

    async def cell() -> str:
        with streamflow.offload(subject.model, device=device):
            return subject.forward()

    assert notebook.cell(cell()) == subject.expected
    subject.check_restored(device)


def test_a_cell_that_opens_on_its_own_loop_is_told_to_run_there(notebook: Notebook) -> None:
    """`open_offload` lives on the loop of its cell: a plain call there would wait for itself."""
    subject, device = make_subject(), CpuDevice()

    async def cell() -> str:
        async with streamflow.open_offload(subject.model, device=device) as offload:
            with pytest.raises(LoopThreadError, match=r"offload\.run"):
                subject.forward()
            return await offload.run(subject.forward)

    assert notebook.cell(cell()) == subject.expected
    subject.check_restored(device)


def test_a_guest_of_trio_is_closed_with_the_nursery_that_it_was_opened_in() -> None:
    """As in a program of trio's: the task that holds the offload is cancelled with the rest."""
    subject, device = make_subject(), CpuDevice()

    async def hold(task_status: trio.TaskStatus[Offload]) -> None:
        async with streamflow.open_offload(subject.model, device=device) as offload:
            task_status.started(offload)
            await trio.sleep_forever()

    async def main() -> str:
        async with trio.open_nursery() as nursery:
            offload: Offload = await nursery.start(hold)
            digest = await offload.run(subject.forward)
            nursery.cancel_scope.cancel()
        return digest

    assert trio.run(main) == subject.expected
    subject.check_restored(device)
