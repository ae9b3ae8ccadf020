"""Requests are served one at a time, first come first served, wherever they come from, whatever becomes of others."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from torch import nn

import streamflow
from streamflow import Offload
from streamflow.runtime.admission import Admission, Turn
from streamflow.runtime.requests import Request
from streamflow.stages.engine import Engine
from streamflow.stages.places import Place
from streamflow.stages.signals import loop_waker
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


async def until_waiting(offload: Offload, num: int) -> None:
    """Return when so many wait for a place."""
    await until_so(lambda: offload.statistics().num_waiting == num)


async def test_many_tasks_of_one_loop_are_served_one_at_a_time() -> None:
    subject = make_subject()
    most: list[int] = []
    outputs: list[str] = []
    subject.script.inside = lambda index: most.append(subject.script.num_inside)

    async def ask(offload: Offload) -> None:
        outputs.append(await offload.run(subject.forward))

    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask, offload)
        assert set(most) == {1}
        assert subject.script.entered == list(range(subject.num_blocks)) * 20
        await subject.check_next(offload)
    assert outputs == [subject.expected] * 20


def ask_on_a_loop_of_ones_own(work: Callable[[Offload], None], offload: Offload, backend: str) -> None:
    anyio.run(partial(offload.run, work, offload), backend=backend)


def call_directly(subject: Subject, order: list[str], name: str) -> None:
    """A direct call, which notes when its first block is entered."""
    me = threading.get_ident()
    block: nn.Module = subject.model.blocks[0]  # type: ignore[index, assignment]
    with block.register_forward_pre_hook(lambda *_: order.append(name) if threading.get_ident() == me else None):
        assert subject.forward() == subject.expected


async def test_tasks_of_several_loops_and_threads_are_served_in_the_order_in_which_they_came() -> None:
    """Each of them starts to wait before the next one does."""
    subject = make_subject()
    order: list[str] = []

    def work(name: str, offload: Offload) -> None:
        order.append(name)
        assert subject.forward() == subject.expected

    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        held = Held(subject)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload.run, partial(work, "first", offload))
            await until(held.in_block)
            expected = ["first"]
            for round_ in range(3):
                for kind in ("task", "asyncio", "trio", "thread"):
                    name = f"{kind} {round_}"
                    if kind == "task":
                        tasks.start_soon(offload.run, partial(work, name, offload))
                    elif kind == "thread":
                        tasks.start_soon(anyio.to_thread.run_sync, partial(call_directly, subject, order, name))
                    else:
                        ask = partial(ask_on_a_loop_of_ones_own, partial(work, name), offload, kind)
                        tasks.start_soon(anyio.to_thread.run_sync, ask)
                    expected.append(name)
                    await until_waiting(offload, len(expected) - 1)
            held.let_go.set()
        assert order == expected
        await subject.check_next(offload)


async def test_those_who_give_up_leave_no_hole() -> None:
    subject = make_subject()
    order: list[int] = []

    def work(number: int) -> None:
        order.append(number)
        assert subject.forward() == subject.expected

    async def ask(offload: Offload, number: int, scope: anyio.CancelScope) -> None:
        with scope:
            await offload.run(work, number)

    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        held = Held(subject)
        scopes = [anyio.CancelScope() for _ in range(8)]
        async with anyio.create_task_group() as tasks:
            for number, scope in enumerate(scopes):
                tasks.start_soon(ask, offload, number, scope)
                await (until(held.in_block) if number == 0 else until_waiting(offload, number))
            for gone in (1, 4, 7):
                scopes[gone].cancel()
            await until_waiting(offload, 4)
            held.let_go.set()
        assert order == [0, 2, 3, 5, 6]
        await subject.check_next(offload)


async def test_a_cancellation_just_after_the_forward_ended_does_not_stop_the_next(
    stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place is free, and perhaps somebody else's, when the caller gives its turn up."""
    subject = make_subject()
    gave_up = threading.Event()
    clean, see_off = Engine.end_request, Admission._see_off

    def see_off_and_tell(admission: Admission, turn: Turn) -> None:
        see_off(admission, turn)
        gave_up.set()

    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        with anyio.CancelScope() as scope:
            wake = loop_waker()

            def clean_and_cancel(engine: Engine, place: Place) -> None:
                clean(engine, place)
                wake(scope.cancel)
                wait_for(gave_up)

            with monkeypatch.context() as patch:
                patch.setattr(Admission, "_see_off", see_off_and_tell)
                patch.setattr(offload._admission, "_clean", partial(clean_and_cancel, offload._engine))
                await offload.run(subject.forward)
        assert scope.cancelled_caught
        assert not stops.told.is_set()
        assert subject.script.entered == list(range(subject.num_blocks))
        await subject.check_next(offload)


async def test_a_cancellation_just_when_the_place_is_given_stops_before_the_first_block(
    stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make_subject()
    serve = Request.serve
    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        with anyio.CancelScope() as scope:
            wake = loop_waker()

            def cancel_and_serve(request: Request[object], place: Place) -> None:
                wake(scope.cancel)
                wait_for(stops.told)
                serve(request, place)

            with monkeypatch.context() as patch:
                patch.setattr(Request, "serve", cancel_and_serve)
                await offload.run(subject.forward)
        assert scope.cancelled_caught
        assert subject.script.entered == []
        await subject.check_next(offload)


async def test_what_a_request_gave_is_not_kept_for_the_next_hours() -> None:
    """Neither the place's thread nor the admission holds what the caller got."""
    subject = make_subject()
    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        result = await offload.run(lambda: subject.model.exit(subject.inputs))  # type: ignore[operator]
        gone = weakref.ref(result)
        del result
        with anyio.fail_after(10):
            while gone() is not None:
                gc.collect()
                await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_what_such_a_request_made_goes_with_its_exception(end: str) -> None:
    """At once, not when the collector comes by: the next request needs the memory."""
    subject = make_subject()
    made: list[weakref.ref[object]] = []
    is_going = threading.Event()

    def work() -> None:
        activation = subject.model.exit(subject.inputs)  # type: ignore[operator]
        made.append(weakref.ref(activation))
        if end == "failed":
            raise MemoryError
        while True:
            is_going.set()
            subject.forward()

    async with streamflow.open_offload(subject.model, ONE_AT_A_TIME) as offload:
        gc.collect()
        gc.disable()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ignoring_memory_errors, offload, work)
                if end == "cancelled":
                    await until(is_going)
                    tasks.cancel_scope.cancel()
            await until_so(lambda: made[0]() is None)
        finally:
            gc.enable()


async def ignoring_memory_errors(offload: Offload, work: Callable[[], None]) -> None:
    with contextlib.suppress(MemoryError):
        await offload.run(work)
