"""What a request can ask for itself: priority, deadline, a name; and what it is told when there is no room."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import anyio
import pytest

import streamflow
from streamflow import Offload
from streamflow.errors import ConfigurationError, DeadlineExceededError, OverloadedError, RequestReusedError
from streamflow.stages.errors import EngineClosedError, StreamflowError
from streamflow.stages.events import ObservedEvent, PassStarted, RequestEnded, RequestStarted
from tests.streamflow.runtime.kit import ONE_AT_A_TIME, Stops, Subject, make_subject, until, until_so, wait_for

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]


class Held:
    """The first request stays in its first block until it is let go."""

    def __init__(self, subject: Subject) -> None:
        self.in_block, self.let_go = threading.Event(), threading.Event()
        subject.script.inside = self._stay

    def _stay(self, index: int) -> None:
        if not self.in_block.is_set():
            self.in_block.set()
            wait_for(self.let_go)


async def test_the_most_urgent_come_first_and_equals_in_their_order() -> None:
    subject, order = make_subject(), list[str]()

    def work(name: str) -> None:
        order.append(name)
        subject.forward()

    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        held = Held(subject)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload.run, work, "first")
            await until(held.in_block)
            requests = []
            for number, (name, priority) in enumerate([("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)]):
                request = offload.request(priority=priority, request_id=name)
                requests.append(request)
                assert (request.phase, request.position) == ("new", None)
                tasks.start_soon(request.run, work, name)
                await until_so(lambda number=number: offload.statistics().num_waiting == number + 1)  # type: ignore[misc]
            assert [(request.phase, request.position) for request in requests] == [
                ("waiting", place) for place in (2, 0, 3, 1, 4)
            ]
            occupancy = offload.statistics().occupancy
            assert occupancy.running == ("request 1",)
            assert occupancy.waiting == ("b", "d", "a", "c", "e")
            held.let_go.set()
        assert order == ["first", "b", "d", "a", "c", "e"]
        assert {(request.phase, request.position) for request in requests} == {("done", None)}
        assert offload.statistics().outcomes.completed == 6


async def test_one_too_many_is_refused_at_once_with_the_numbers() -> None:
    subject = make_subject()
    options = {**ONE_AT_A_TIME, "max_waiting_requests": 2}
    async with streamflow.open_offload(subject.model, options) as offload:
        held = Held(subject)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload.run, subject.forward)
            await until(held.in_block)
            for _ in range(2):
                tasks.start_soon(offload.run, subject.forward)
            await until_so(lambda: offload.statistics().num_waiting == 2)
            with pytest.raises(OverloadedError, match="raise max_waiting_requests") as caught:
                await offload.request(request_id="one too many").run(subject.forward)
            with pytest.raises(OverloadedError):  # a direct call waits for a place like everybody
                await anyio.to_thread.run_sync(subject.forward)
            held.let_go.set()
        assert (caught.value.running, caught.value.waiting, caught.value.limit) == (1, 2, 2)
        assert caught.value.request_id == "one too many"
        assert offload.statistics().outcomes.overloaded == 1
        await subject.check_next(offload)


async def test_nobody_waits_where_nobody_may() -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model, {**ONE_AT_A_TIME, "max_waiting_requests": 0}) as offload:
        await subject.check_next(offload)
        held = Held(subject)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload.run, subject.forward)
            await until(held.in_block)
            with pytest.raises(OverloadedError):
                await offload.run(subject.forward)
            held.let_go.set()


async def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(stops: Stops) -> None:
    subject, in_block = make_subject(), threading.Event()

    def stay(index: int) -> None:
        in_block.set()
        wait_for(stops.told)

    async def expect(offload: Offload, phase: str, name: str, deadline_s: float) -> None:
        request = offload.request(deadline_s=deadline_s, request_id=name)
        with pytest.raises(DeadlineExceededError, match=f"'{name}' was still {phase}") as caught:
            await request.run(subject.forward)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, StreamflowError)
        assert (caught.value.request_id, caught.value.deadline_s, caught.value.phase) == (name, deadline_s, phase)

    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        subject.script.inside = stay
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect, offload, "running", "slow", 0.5)
            await until(in_block)
            await expect(offload, "waiting", "late", 0.01)
        assert subject.script.entered == [0]
        statistics = offload.statistics()
        assert statistics.outcomes.deadline_exceeded == 2
        assert statistics.occupancy.longest_stop_s > 0
        await subject.check_next(offload)


async def test_a_request_that_is_done_in_time_does_not_hear_of_its_deadline() -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        assert await offload.request(deadline_s=1000).run(subject.forward) == subject.expected


async def test_the_name_of_a_request_is_in_its_errors_and_events() -> None:
    subject = make_subject()
    told: list[ObservedEvent] = []
    async with streamflow.open_offload(subject.model) as offload:
        with offload.observe() as events:
            await offload.request(request_id="mine").run(subject.forward)
            await anyio.to_thread.run_sync(subject.forward)
            while sum(isinstance(event, RequestEnded) for event in told) < 2:
                told.append(await events.receive())
        late = offload.request(request_id="late")
    named: list[Any] = [event for event in told if isinstance(event, (RequestStarted, PassStarted, RequestEnded))]
    assert [(type(event).__name__, event.request_id) for event in named] == [
        *((kind, "mine") for kind in ("RequestStarted", "PassStarted", "RequestEnded")),
        *((kind, None) for kind in ("RequestStarted", "PassStarted", "RequestEnded")),
    ]
    with pytest.raises(EngineClosedError) as caught:
        await late.run(subject.forward)
    assert caught.value.request_id == "late"
    assert offload.statistics().outcomes.closed == 1


async def test_a_request_runs_once() -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        request = offload.request()
        await request.run(subject.forward)
        with pytest.raises(RequestReusedError, match=r"make another one with offload.request\(\)"):
            await request.run(subject.forward)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"priority": 1.5}, "priority must be an integer"),
        ({"priority": True}, "priority must be an integer"),
        ({"deadline_s": 0}, "deadline_s is 0 but must be more"),
        ({"deadline_s": float("nan")}, "deadline_s is nan but must be more"),
        ({"deadline_s": "1"}, "deadline_s must be a number"),
        ({"request_id": ""}, "request_id must be a name"),
        ({"request_id": 7}, "request_id must be a name"),
    ],
)
async def test_options_that_are_not_usable_are_refused(options: dict[str, Any], problem: str) -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        with pytest.raises(ConfigurationError, match=problem):
            offload.request(**options)


async def test_failures_and_cancellations_are_counted_apart() -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        with pytest.raises(ZeroDivisionError):
            await offload.run(lambda: 1 / 0)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await offload.run(subject.forward)
        outcomes = offload.statistics().outcomes
    assert (outcomes.failed, outcomes.cancelled, outcomes.completed) == (1, 1, 0)


# What requests must not share


class Scheduler:
    """A scheduler as pipelines have them."""

    def set_timesteps(self, num_steps: int) -> None:
        pass


class Pipeline:
    """A pipeline that notes how many are in it."""

    def __init__(self, scheduler: Scheduler, inside: list[int], together: threading.Barrier | None) -> None:
        self.scheduler, self.inside, self._together = scheduler, inside, together
        self.num_inside = 0

    def __call__(self) -> None:
        self.num_inside += 1
        self.inside.append(self.num_inside)
        if self._together is not None:
            self._together.wait()
        self.num_inside -= 1


@pytest.mark.parametrize("wrap", ["itself", "lambda", "method", "argument"])
async def test_requests_that_share_a_scheduler_are_served_one_after_the_other(wrap: str) -> None:
    subject = make_subject()
    pipeline = Pipeline(Scheduler(), [], None)
    work: Any = {
        "itself": pipeline,
        "lambda": lambda: pipeline(),
        "method": pipeline.__call__,
        "argument": partial(lambda one: one(), pipeline),
    }[wrap]
    async with streamflow.open_offload(subject.model) as offload, anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(offload.run, work)
    assert pipeline.inside == [1] * 8


async def test_requests_with_a_scheduler_each_run_side_by_side() -> None:
    subject = make_subject()
    together = threading.Barrier(4, timeout=60)
    async with streamflow.open_offload(subject.model) as offload, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(offload.run, Pipeline(Scheduler(), [], together))
