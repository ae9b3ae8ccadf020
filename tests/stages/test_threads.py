"""Worker threads end with their owner, whatever happens to it, and no cancellation leaves one alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import anyio
import anyio.lowlevel
import pytest
import trio

from streamflow.stages.signals import LoopEvent
from streamflow.stages.threads import (
    ThreadCrew,
    WorkerThread,
    more_urgent,
    open_tasks,
    open_threads,
    raise_urgent,
    wait_through,
)

on_both_loops = pytest.mark.anyio


def on_one_loop(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("anyio_backend", [name], indirect=True)


class Stopped(BaseException):
    """An error that no ``except Exception`` catches."""


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("streamflow"))


async def wait_until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not is_so():
            await anyio.lowlevel.checkpoint()


class Gate:
    """Work that has begun, stays until it is let go, and is over then. A test that fails lets it go too."""

    def __init__(self, result: object = None) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.is_over = False
        self._result = result

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *failure: object) -> None:
        self.let_go.set()

    def work(self) -> object:
        self.begun.set()
        self.let_go.wait()
        self.is_over = True
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


# One thread


def test_a_thread_runs_its_jobs_in_order_keeps_the_last_failure_and_goes_on() -> None:
    thread = WorkerThread("streamflow test")
    done: list[int] = []
    failures = [ValueError("one"), Stopped()]

    def fail(failure: BaseException) -> None:
        raise failure

    thread.submit(lambda: done.append(1))
    thread.submit(partial(fail, failures[0]))
    thread.submit(partial(fail, failures[1]))
    thread.submit(lambda: done.append(2))
    thread.finish()
    thread.submit(lambda: done.append(3))
    thread.run()
    assert done == [1, 2]
    assert thread.failure is failures[1]


def test_a_thread_has_its_name_while_it_runs_and_gives_the_borrowed_one_back() -> None:
    thread = WorkerThread("streamflow test")
    seen: list[str] = []
    thread.submit(lambda: seen.append(threading.current_thread().name))
    thread.finish()
    before = threading.current_thread().name
    thread.run()
    assert seen == ["streamflow test"]
    assert threading.current_thread().name == before


@on_both_loops
async def test_a_thread_that_waits_for_jobs_keeps_nothing_of_the_last_one() -> None:
    class Tensor:
        pass

    tensor = Tensor()
    gone = weakref.ref(tensor)
    done = LoopEvent()
    async with open_threads() as crew:
        crew.start("streamflow test").submit(partial(lambda held: done.set(), tensor))
        del tensor
        await done.wait()
        await wait_until(lambda: gc.collect() >= 0 and gone() is None)


# The crew


@on_both_loops
async def test_a_crews_threads_have_names_and_are_gone_after_it() -> None:
    before = names()
    async with open_threads() as crew:
        for index in range(3):
            crew.start(f"streamflow test {index}")
        own = ["streamflow clean-up", "streamflow test 0", "streamflow test 1", "streamflow test 2"]
        await wait_until(lambda: names() == sorted([*before, *own]))
    assert names() == before


@on_both_loops
async def test_leaving_a_crew_waits_until_the_queues_are_empty() -> None:
    done: list[int] = []
    async with open_threads() as crew:
        thread = crew.start("streamflow test")
        for index in range(100):
            thread.submit(partial(done.append, index))
    assert done == list(range(100))


@on_both_loops
@pytest.mark.parametrize("error", [ValueError("mine"), Stopped()])
async def test_the_bodys_error_leaves_a_crew_as_it_is_and_no_thread_behind(error: BaseException) -> None:
    async def body() -> None:
        async with open_threads() as crew:
            crew.start("streamflow test")
            raise error

    before = names()
    with pytest.raises(type(error)) as caught:
        await body()
    assert caught.value is error
    assert names() == before


@on_both_loops
async def test_the_bodys_error_is_not_lost_to_a_cancellation_around_the_crew() -> None:
    async def body() -> None:
        with anyio.CancelScope() as scope:
            async with open_threads() as crew:
                crew.start("streamflow test")
                await anyio.lowlevel.checkpoint()
                scope.cancel()
                raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await body()


@on_both_loops
async def test_a_cancelled_crew_waits_for_its_threads_all_the_same() -> None:
    with anyio.CancelScope() as scope:
        async with open_threads() as crew:
            with Gate() as gate:
                crew.start("streamflow test").submit(gate.work)
                await wait_until(gate.begun.is_set)
                scope.cancel()
                await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert gate.is_over


@on_both_loops
async def test_a_crew_opened_under_a_cancellation_still_runs_what_it_was_given() -> None:
    done: list[int] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with open_threads() as crew:
            crew.start("streamflow test").submit(lambda: done.append(1))
    assert done == [1]


@pytest.mark.anyio
@on_one_loop("asyncio")
@pytest.mark.parametrize("num_steps", range(1, 8))
async def test_cancelling_the_task_that_owns_a_thread_again_and_again_abandons_nothing(num_steps: int) -> None:
    async with open_threads() as crew:
        with Gate() as gate:
            crew.start("streamflow test").submit(gate.work)
            for _ in range(num_steps):
                await anyio.lowlevel.checkpoint()
            (owner,) = [task for task in asyncio.all_tasks() if task.get_name() == "owner of streamflow test"]
            for _ in range(3):
                owner.cancel()
                await anyio.wait_all_tasks_blocked()
                assert not owner.done()
    assert gate.is_over


# Tasks


async def fail_with(error: BaseException) -> None:
    raise error


@on_both_loops
@pytest.mark.parametrize("error", [ValueError("of a task"), Stopped()])
async def test_an_error_of_a_task_leaves_open_tasks_as_it_is(error: BaseException) -> None:
    async def body() -> None:
        async with open_tasks() as tasks:
            tasks.start_soon(fail_with, error)
            await anyio.sleep_forever()

    with pytest.raises(type(error)) as caught:
        await body()
    assert caught.value is error


@on_both_loops
async def test_an_error_of_a_task_within_tasks_leaves_too() -> None:
    async def inner() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail_with, ValueError("of an inner task"))

    async def body() -> None:
        async with open_tasks() as tasks:
            tasks.start_soon(inner)

    with pytest.raises(ValueError, match="of an inner task"):
        await body()


@on_both_loops
async def test_the_bodys_error_goes_before_that_of_a_task() -> None:
    async def body() -> None:
        async with open_tasks() as tasks:
            tasks.start_soon(fail_with, TypeError("of a task"))
            raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        await body()


@on_both_loops
async def test_a_cancellation_around_tasks_stays_one() -> None:
    with anyio.CancelScope() as scope:
        async with open_tasks() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            scope.cancel()
    assert scope.cancelled_caught


# Calls


@on_both_loops
async def test_a_call_returns_what_the_work_returns_from_another_thread() -> None:
    async with open_threads() as crew:
        assert await crew.call(threading.get_ident) != threading.get_ident()
        assert await crew.call(lambda: threading.current_thread().name, name="reading") == "streamflow reading"
        await wait_until(lambda: names() == ["streamflow clean-up"])


@on_both_loops
@pytest.mark.parametrize("error", [ValueError("mine"), Stopped()])
async def test_a_call_raises_what_the_work_raises(error: BaseException) -> None:
    def fail() -> None:
        raise error

    undone: list[object] = []
    async with open_threads() as crew:
        with pytest.raises(type(error)) as caught:
            await crew.call(fail, undo=undone.append)
    assert caught.value is error
    assert undone == []


async def call_at_a_gate(crew: ThreadCrew, gate: Gate, undo: Callable[[object], object] | None = None) -> object:
    """A call that ends only once it is cancelled."""
    return await crew.call(gate.work, undo=undo, on_cancel=gate.let_go.set)


@on_both_loops
async def test_a_call_cancelled_by_a_scope_waits_for_the_thread_and_undoes_its_result_in_a_thread() -> None:
    undone: list[tuple[object, bool]] = []

    def undo(result: object) -> None:
        undone.append((result, threading.current_thread() is threading.main_thread()))

    async with open_threads() as crew:
        with Gate("result") as gate, anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call_at_a_gate, crew, gate, undo)
                await wait_until(gate.begun.is_set)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert gate.is_over
        assert undone == [("result", False)]


@on_both_loops
async def test_a_call_that_was_cancelled_before_it_began_runs_and_is_undone() -> None:
    undone: list[int] = []
    async with open_threads() as crew:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await crew.call(lambda: 5, undo=undone.append)
        assert scope.cancelled_caught
        assert undone == [5]


@on_both_loops
async def test_a_cancelled_call_whose_work_failed_undoes_nothing_and_is_cancelled() -> None:
    undone: list[object] = []
    async with open_threads() as crew:
        with Gate(ValueError("mine")) as gate, anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call_at_a_gate, crew, gate, undone.append)
                await wait_until(gate.begun.is_set)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert gate.is_over
        assert undone == []


async def cancelled_call(crew: ThreadCrew, **ways: Callable[..., object]) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await crew.call(lambda: 5, **ways)


def fail_with_mine(*ignored: object) -> None:
    raise ValueError("mine")


@on_both_loops
async def test_an_error_of_undoing_comes_out_of_a_cancelled_call() -> None:
    async with open_threads() as crew:
        with pytest.raises(ValueError, match="mine"):
            await cancelled_call(crew, undo=fail_with_mine)


@on_both_loops
async def test_a_call_whose_on_cancel_fails_waits_and_undoes_all_the_same() -> None:
    undone: list[int] = []
    async with open_threads() as crew:
        with pytest.raises(ValueError, match="mine"):
            await cancelled_call(crew, undo=undone.append, on_cancel=fail_with_mine)
        assert undone == [5]


@on_both_loops
async def test_the_threads_of_calls_are_not_remembered() -> None:
    async with open_threads() as crew:
        before = list(crew._threads)
        for _ in range(3):
            await crew.call(threading.get_ident)
        assert crew._threads == before
        await wait_until(lambda: names() == ["streamflow clean-up"])


@on_both_loops
async def test_a_call_for_which_no_thread_can_be_started_says_so_and_the_crew_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*args: object, **kwargs: object) -> None:
        await anyio.lowlevel.checkpoint()
        raise RuntimeError("can't start new thread")

    async with open_threads() as crew:
        await wait_until(lambda: names() == ["streamflow clean-up"])
        with monkeypatch.context() as patch, anyio.fail_after(60):
            patch.setattr(anyio.to_thread, "run_sync", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await crew.call(lambda: 5)
        assert await crew.call(lambda: 6) == 6


@pytest.mark.anyio
@on_one_loop("asyncio")
@pytest.mark.parametrize("num_cancels", [1, 2, 3])
async def test_a_call_cancelled_natively_once_or_more_waits_and_undoes(num_cancels: int) -> None:
    undone: list[object] = []
    async with open_threads() as crew:
        with Gate("result") as gate:
            task = asyncio.create_task(crew.call(gate.work, undo=undone.append))
            await wait_until(gate.begun.is_set)
            for count in range(num_cancels):
                task.cancel(f"cancel {count}")
                await anyio.wait_all_tasks_blocked()
                assert not task.done()
        with pytest.raises(asyncio.CancelledError, match="cancel 0"):
            await task
        assert gate.is_over
        assert undone == ["result"]


@pytest.mark.anyio
@on_one_loop("asyncio")
async def test_a_call_under_asyncios_own_time_limits_waits_for_the_thread() -> None:
    async with open_threads() as crew:
        gate = Gate()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call_at_a_gate(crew, gate), 0.01)
        assert gate.is_over
        gate = Gate()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await call_at_a_gate(crew, gate)
        assert gate.is_over


@pytest.mark.anyio
@on_one_loop("trio")
async def test_a_call_cancelled_by_trio_waits_and_undoes() -> None:
    undone: list[object] = []
    async with open_threads() as crew:
        with Gate("result") as gate, trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call_at_a_gate, crew, gate, undone.append)
                await wait_until(gate.begun.is_set)
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert gate.is_over
        assert undone == ["result"]


@on_both_loops
async def test_a_clean_up_call_runs_to_its_end_under_a_cancellation_and_returns() -> None:
    async with open_threads() as crew:
        with anyio.CancelScope() as scope:
            scope.cancel()
            assert await crew.call_through(lambda: 5) == 5
        assert not scope.cancelled_caught


@on_both_loops
async def test_clean_up_calls_start_no_thread_and_raise_what_the_work_raises() -> None:
    def fail() -> None:
        raise ValueError(threading.current_thread().name)

    async with open_threads() as crew:
        await wait_until(lambda: names() == ["streamflow clean-up"])
        for _ in range(2):
            with pytest.raises(ValueError, match="streamflow clean-up"):
                await crew.call_through(fail)
        assert names() == ["streamflow clean-up"]


@pytest.mark.anyio
@on_one_loop("asyncio")
async def test_a_clean_up_call_cancelled_natively_runs_to_its_end_and_is_cancelled_then() -> None:
    async with open_threads() as crew:
        with Gate() as gate:
            task = asyncio.create_task(crew.call_through(gate.work))
            await wait_until(gate.begun.is_set)
            for _ in range(2):
                task.cancel()
                await anyio.wait_all_tasks_blocked()
                assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.is_over


@pytest.mark.anyio
@on_one_loop("asyncio")
async def test_an_error_of_a_clean_up_call_comes_out_of_its_cancellation() -> None:
    async with open_threads() as crew:
        with Gate(ValueError("mine")) as gate:
            task = asyncio.create_task(crew.call_through(gate.work))
            await wait_until(gate.begun.is_set)
            task.cancel()
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(ValueError, match="mine"):
            await task


@pytest.mark.parametrize(
    ("interruption", "failure", "raised"),
    [
        (asyncio.CancelledError(), None, 0),
        (asyncio.CancelledError(), ValueError(), 1),
        (KeyboardInterrupt(), ValueError(), 0),
    ],
)
def test_a_failure_is_raised_rather_than_a_cancellation_and_an_interrupt_from_it(
    interruption: BaseException, failure: BaseException | None, raised: int
) -> None:
    with pytest.raises((asyncio.CancelledError, ValueError, KeyboardInterrupt)) as caught:
        raise_urgent(interruption, failure)
    assert caught.value is (interruption, failure)[raised]
    assert caught.value.__cause__ is (None if raised else failure)


# Waiting through


@on_both_loops
async def test_waiting_through_a_scopes_cancellation_absorbs_it() -> None:
    event = LoopEvent()
    ended: list[object] = []

    async def wait() -> None:
        ended.append(await wait_through(event))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                assert ended == []
                event.set()
    assert ended == [None]


@pytest.mark.anyio
@on_one_loop("asyncio")
async def test_waiting_through_two_native_cancels_returns_the_first() -> None:
    event = LoopEvent()
    task = asyncio.create_task(wait_through(event))
    await anyio.wait_all_tasks_blocked()
    for message in ("first", "second"):
        task.cancel(message)
        await anyio.wait_all_tasks_blocked()
        assert not task.done()
    event.set()
    absorbed = await task
    assert isinstance(absorbed, asyncio.CancelledError)
    assert absorbed.args == ("first",)


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        (ValueError(), None, 0),
        (ValueError(), TypeError(), 0),
        (ValueError(), KeyboardInterrupt(), 1),
        (KeyboardInterrupt(), ValueError(), 0),
        (KeyboardInterrupt(), KeyboardInterrupt(), 0),
    ],
)
def test_the_first_exception_is_the_more_urgent_unless_only_the_second_is_the_users(
    first: BaseException, then: BaseException | None, expected: int
) -> None:
    assert more_urgent(first, then) is (first, then)[expected]
