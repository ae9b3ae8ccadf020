"""Worker threads with an owner: each belongs to a task that waits for it, and none outlives its crew."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, NoReturn, TypeVar

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

    def refuse(self, failure: BaseException) -> None:
        """There is no thread to run it."""
        self.result.set_exception(failure)
        self.finished.set()


async def wait_through(*events: LoopEvent) -> BaseException | None:
    """Return once all ``events`` are set, whatever comes meanwhile. For a caller that must not leave before threads are
    done.

    A shield holds a scope's cancellation off. What goes through it (asyncio's ``task.cancel()``, and an interrupt) is
    absorbed; the most urgent of it is returned, for the caller to raise in the end: nobody else would.
    """
    absorbed: BaseException | None = None
    while True:
        try:
            for event in events:
                while not event.is_set():
                    with anyio.CancelScope(shield=True):
                        await event.wait()
            return absorbed
        except (anyio.get_cancelled_exc_class(), KeyboardInterrupt) as interruption:
            absorbed = interruption if absorbed is None else more_urgent(absorbed, interruption)


def more_urgent(first: BaseException, then: BaseException | None) -> BaseException:
    """The one of two exceptions to raise: the first, unless only the second is an interrupt by the user."""
    return then if isinstance(then, KeyboardInterrupt) and not isinstance(first, KeyboardInterrupt) else first


def raise_urgent(interruption: BaseException, failure: BaseException | None) -> NoReturn:
    """Raise what interrupted something, or rather, if it failed besides, that failure: a cancellation says nothing.

    :raises BaseException: the one or the other.
    """
    if failure is None:
        raise interruption from None
    if more_urgent(failure, interruption) is failure:
        raise failure
    raise interruption from failure


class ThreadCrew:
    """The worker threads of one owner. Made by `open_threads`."""

    def __init__(self, task_group: anyio.abc.TaskGroup) -> None:
        self._task_group = task_group
        self._threads: list[WorkerThread] = []
        # there from the start: a process that ends can close what is open, but starts no thread any more
        self._cleaner = self.start("streamflow clean-up")

    def start(self, name: str) -> WorkerThread:
        """A new thread; it ends with the crew. On the crew's loop only."""
        thread = WorkerThread(name)
        self._task_group.start_soon(_own, thread, name=f"owner of {name}")
        self._threads.append(thread)
        return thread

    async def call(
        self,
        work: Callable[[], Result],
        *,
        undo: Callable[[Result], object] | None = None,
        on_cancel: Callable[[], object] | None = None,
        name: str = "helper",
    ) -> Result:
        """What ``work`` returns, run in a thread of its own.

        A cancelled call tells ``on_cancel`` so at once, waits for the thread all the same, gives the result to ``undo``
        (in a thread too), and is cancelled then. What these raise comes out instead of the cancellation, which nobody
        would look into, and as the cause of an interrupt by the user.

        :raises RuntimeError: if no thread can be started.
        """
        job = self._begin(work, name)
        try:
            await job.finished.wait()
        except BaseException as interruption:
            urgent = interruption if on_cancel is None else _tell(on_cancel, interruption)
            urgent = more_urgent(urgent, await wait_through(job.finished))
            if undo is None or job.result.exception() is not None:
                raise urgent from None
            undoing = self._begin(lambda: undo(job.result.result()), f"{name} undo")
            urgent = more_urgent(urgent, await wait_through(undoing.finished))
            raise_urgent(urgent, undoing.result.exception())
        return job.result.result()

    async def call_through(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns, run in a thread to its end. For clean-up: an interruption is raised after it.

        What ``work`` raises comes out instead of a cancellation, and as the cause of an interrupt by the user. All
        these calls share one thread, which is there already.
        """
        job = _Job(work)
        self._cleaner.submit(job.run)
        absorbed = await wait_through(job.finished)
        if absorbed is not None:
            raise_urgent(absorbed, job.result.exception())
        return job.result.result()

    def _begin(self, work: Callable[[], Result], name: str) -> _Job[Result]:
        """Have it done in a thread that is gone after it: nothing remembers those."""
        job = _Job(work)
        thread = WorkerThread(f"streamflow {name}")
        thread.submit(job.run)
        thread.finish()
        self._task_group.start_soon(_own_for, job, thread, name=f"owner of {thread.name}")
        return job

    def finish(self) -> None:
        """Ask every thread to end once its queue is empty."""
        for thread in self._threads:
            thread.finish()


def _tell(on_cancel: Callable[[], object], interruption: BaseException) -> BaseException:
    """Call ``on_cancel``; returns what to raise in the end."""
    try:
        on_cancel()
    except BaseException as failure:
        return more_urgent(failure, interruption)
    return interruption


async def _own_for(job: _Job[Any], thread: WorkerThread) -> None:
    """Own the thread of one job, whose caller hears of it if there is none to be had."""
    try:
        await _own(thread)
    except Exception as failure:
        job.refuse(failure)


async def _own(thread: WorkerThread) -> None:
    ended = LoopEvent()
    unclaimed = [thread]

    def run() -> None:
        if _take_one(unclaimed):
            try:
                thread.run()
            finally:
                ended.set()

    while unclaimed:  # asyncio's task.cancel() goes through the shield, perhaps before the thread has begun
        with suppress(anyio.get_cancelled_exc_class()), anyio.CancelScope(shield=True):
            # A limiter of its own: on the shared one, threads that wait for each other could starve.
            await anyio.to_thread.run_sync(run, limiter=anyio.CapacityLimiter(1))
    await wait_through(ended)  # what it absorbed would end this task, which is at its end


def _take_one(tokens: list[WorkerThread]) -> bool:
    """Whether there was one to take; of several threads that ask, one gets it."""
    try:
        tokens.pop()
    except IndexError:
        return False
    return True


@asynccontextmanager
async def open_threads() -> AsyncIterator[ThreadCrew]:
    """A crew of threads; leaving waits until each has run its queue empty, also under cancellation."""
    async with open_tasks() as task_group:
        crew = ThreadCrew(task_group)
        try:
            yield crew
        finally:
            crew.finish()


@asynccontextmanager
async def open_tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group that lets an error of its body, else of its first task to fail, out as it is: not in an exception
    group, nor lost to a cancellation.
    """
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as task_group:
            try:
                yield task_group
            except BaseException as error:
                failure = error
    except anyio.get_cancelled_exc_class():
        if failure is None:
            raise
    except BaseExceptionGroup as group:
        if failure is None or isinstance(failure, anyio.get_cancelled_exc_class()):  # because of the task
            failure = _first_of(group)
            if isinstance(failure, KeyboardInterrupt) and _loop_is_asyncios():
                # it has ended the loop when it came, which ends now by cancelling us and must not be broken off
                failure = asyncio.CancelledError()
    if failure is not None:
        raise failure


def _loop_is_asyncios() -> bool:
    return anyio.get_cancelled_exc_class() is asyncio.CancelledError


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
