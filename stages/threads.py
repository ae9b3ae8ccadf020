"""Worker threads with an owner: each belongs to a task that waits for it, and none outlives its crew."""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from streamflow.stages.signals import LoopEvent

Result = TypeVar("Result")


class WorkerThread:
    """One thread that runs the jobs given to it, in order.

    A job must keep its own exceptions: one that gets out is kept in `failure`, and the thread goes on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def submit(self, job: Callable[[], object]) -> None:
        """Queue ``job``. From any thread; never blocks."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Let the thread end once it has run what was queued before."""
        self._jobs.put(None)

    def run(self) -> None:
        """The thread's main function: returns after `finish`."""
        thread = threading.current_thread()
        borrowed_name, thread.name = thread.name, self.name
        try:
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException as failure:
                    self.failure = failure
                del job  # a job holds tensors, and this thread may wait for the next one for hours
        finally:
            thread.name = borrowed_name


class _Job(Generic[Result]):
    """A piece of work, its result, and the event that it is there."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self.result: Future[Result] = Future()
        self.finished = LoopEvent()

    def run(self) -> None:
        try:
            self.result.set_result(self._work())
        except BaseException as failure:
            self.result.set_exception(failure)
        finally:
            self.finished.set()


async def wait_through(event: LoopEvent) -> None:
    """Return once ``event`` is set, whatever cancels come meanwhile; they are absorbed, native asyncio ones too.

    For a caller that must not leave before a thread is done; it re-raises its own cancellation afterwards.
    """
    while True:
        try:
            with anyio.CancelScope(shield=True):
                await event.wait()
            return
        except anyio.get_cancelled_exc_class():
            continue  # asyncio's task.cancel() goes through an anyio shield


class ThreadCrew:
    """The worker threads of one owner. Made by `open_threads`."""

    def __init__(self, task_group: anyio.abc.TaskGroup) -> None:
        self._task_group = task_group
        self._threads: list[WorkerThread] = []

    def start(self, name: str) -> WorkerThread:
        """A new thread; it ends with the crew. On the crew's loop only."""
        thread = WorkerThread(name)
        self._threads.append(thread)
        self._task_group.start_soon(_own, thread, name=f"owner of {name}")
        return thread

    async def call(
        self, work: Callable[[], Result], *, undo: Callable[[Result], object] | None = None, name: str = "helper"
    ) -> Result:
        """What ``work`` returns, run in a thread of its own.

        A cancelled call waits for the thread, gives the result to ``undo`` (in a thread too), and is cancelled then.
        """
        job = self._begin(work, name)
        try:
            await job.finished.wait()
        except BaseException:
            await wait_through(job.finished)
            if undo is not None and job.result.exception() is None:
                await wait_through(self._begin(lambda: undo(job.result.result()), f"{name} undo").finished)
            raise
        return job.result.result()

    async def call_through(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns, run in a thread; cancels that come meanwhile are absorbed. For clean-up."""
        job = self._begin(work, "clean-up")
        await wait_through(job.finished)
        return job.result.result()

    def _begin(self, work: Callable[[], Result], name: str) -> _Job[Result]:
        job = _Job(work)
        thread = self.start(f"streamflow {name}")
        thread.submit(job.run)
        thread.finish()
        return job

    def finish(self) -> None:
        """Ask every thread to end once its queue is empty."""
        for thread in self._threads:
            thread.finish()


async def _own(thread: WorkerThread) -> None:
    # A limiter of its own: on the shared one, threads that wait for each other could starve.
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(thread.run, limiter=anyio.CapacityLimiter(1))


@asynccontextmanager
async def open_threads() -> AsyncIterator[ThreadCrew]:
    """A crew of threads; leaving waits until each has run its queue empty, also under cancellation."""
    failure: BaseException | None = None
    async with anyio.create_task_group() as task_group:
        crew = ThreadCrew(task_group)
        try:
            yield crew
        except BaseException as error:
            failure = error  # raised below, outside the task group, so that it is not wrapped
        finally:
            crew.finish()
    if failure is not None:
        raise failure
