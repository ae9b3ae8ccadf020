"""Whatever tears a closing of admission, or a caller who gives up: every turn ends, and every place is free."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import anyio
import attrs
import pytest

from streamflow.runtime.admission import Admission
from streamflow.runtime.offload_request import OffloadRequest
from streamflow.runtime.outcomes import OutcomeCounter
from streamflow.runtime.requests import Request
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import StopForward
from streamflow.stages.places import Place
from streamflow.stages.signals import LoopEvent, loop_waker
from streamflow.stages.threads import open_threads
from tests.streamflow.runtime.interrupters import Interrupter, traced
from tests.streamflow.runtime.kit import CancelAt, by_scope, natively, until_so

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(110)]

NUM_PLACES = 2
PATIENCE_S = 20.0


@attrs.frozen(eq=False)
class Guest:
    """An occupant that stays in its place until it is told to stop."""

    came: LoopEvent = attrs.field(factory=LoopEvent)
    left: LoopEvent = attrs.field(factory=LoopEvent)
    ends: list[str] = attrs.field(factory=list)

    def serve(self, place: Place) -> None:
        self.came.set()
        with suppress(StopForward):
            place.mailbox.wait_for_answer()
        self.ends.append("stopped")

    def refuse(self) -> None:
        self.ends.append("refused")

    def over(self) -> None:
        self.ends.append("over")
        self.left.set()


@asynccontextmanager
async def full(num_guests: int = NUM_PLACES + 2) -> AsyncIterator[tuple[Admission, list[Guest]]]:
    """An admission with so many guests, in every place and waiting. It is closed in the end, if it was not; all within
    the patience of the test.
    """
    with anyio.fail_after(PATIENCE_S):
        async with open_threads() as crew:
            device = CpuDevice()
            await device.open(crew)
            places = [
                Place(index, device.open_compute_stream(f"test {index}"), crew.start(f"streamflow place {index}"), 1)
                for index in range(NUM_PLACES)
            ]
            admission = Admission(places, lambda place: place.mailbox.reset(), 2, crew.start("streamflow door"))
            guests = [Guest() for _ in range(num_guests)]
            for guest in guests:
                admission.enter(guest)
            for guest in guests[:NUM_PLACES]:
                await guest.came.wait()
            try:
                yield admission, guests
            finally:
                admission.cut()
                await admission.close()
                device.close()


async def check_ended(admission: Admission, guests: list[Guest]) -> None:
    """Fail unless every guest heard of its end, once, and nobody has a place or waits for one."""
    for guest in guests:
        await guest.left.wait()
    assert [guest.ends for guest in guests] == [["stopped", "over"]] * NUM_PLACES + [["refused", "over"]] * 2
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def close_twice(admission: Admission, grace_s: float) -> None:
    """As the owner of an offload does it."""
    try:
        await admission.close(grace_s)
    finally:
        admission.cut()
        await admission.close()


each_then = pytest.mark.parametrize("then", [None, 1, 2, 3, 5, 8])


async def at_every_instruction(then: int | None, torn: Callable[[Callable[[], Any]], Awaitable[None]]) -> None:
    """Have ``torn`` interrupted at its first instruction within what it is given, at its second, and so on, until it
    has none left; and again ``then`` instructions later.
    """
    for k in itertools.count(1):
        interrupter = Interrupter(k)
        try:
            await torn(lambda: traced(interrupter, then))  # noqa: B023 - it is over before the next one
        except KeyboardInterrupt:
            assert interrupter.raised_at is not None
        else:
            assert interrupter.raised_at is None, f"the interrupt was lost: {interrupter.raised_at}"
        if interrupter.raised_at is None:
            assert k > 10
            return


@each_then
async def test_a_closing_interrupted_anywhere(then: int | None) -> None:
    """Also twice, one right after the other."""

    async def close(interrupted: Callable[[], Any]) -> None:
        async with full() as (admission, guests):
            try:
                with interrupted():
                    await close_twice(admission, 0.0)
            finally:
                if then is None:
                    assert (admission.num_running, admission.num_waiting) == (0, 0), "it returned too early"
                await check_ended(admission, guests)

    await at_every_instruction(then, close)


WAYS = [
    pytest.param("asyncio", by_scope, id="asyncio-scope"),
    pytest.param("trio", by_scope, id="trio-scope"),
    pytest.param("asyncio", natively, id="asyncio-native"),
    pytest.param("asyncio", partial(natively, num_cancels=2), id="asyncio-native-twice"),
    pytest.param("asyncio", partial(natively, num_cancels=9), id="asyncio-native-often"),
]


each_way = pytest.mark.parametrize(("anyio_backend", "cancel_at"), WAYS, indirect=["anyio_backend"])


@each_way
async def test_a_closing_cancelled_at_any_step(cancel_at: CancelAt) -> None:
    """It goes on to its end: when it is over every place is free."""
    for k in itertools.count(1):
        async with full() as (admission, guests):
            num_steps = await cancel_at(admission.close(), k)
            assert (admission.num_running, admission.num_waiting) == (0, 0)
            await check_ended(admission, guests)
        if num_steps < k:
            return


@each_way
async def test_a_cancellation_ends_the_time_of_grace(cancel_at: CancelAt) -> None:
    async with full() as (admission, guests):
        await cancel_at(admission.close(grace_s=2 * PATIENCE_S), 1)
        assert (admission.num_running, admission.num_waiting) == (0, 0)
        await check_ended(admission, guests)


@each_then
@pytest.mark.parametrize("num_guests", [NUM_PLACES + 1, NUM_PLACES - 1], ids=["waiting", "running"])
async def test_a_request_interrupted_anywhere_is_withdrawn_or_stopped(num_guests: int, then: int | None) -> None:
    """Also while it deals with a cancellation, and also twice: nothing of it stays, and nobody else is touched."""

    async def run(interrupted: Callable[[], Any]) -> None:
        async with full(num_guests) as (admission, guests):
            scope, wake = anyio.CancelScope(), loop_waker()

            def work(place: Place) -> None:
                wake(scope.cancel)
                place.mailbox.wait_for_answer()

            try:
                with interrupted(), scope:
                    if num_guests > NUM_PLACES:
                        scope.cancel()
                    await request_of(admission, work).run(work)
                assert scope.cancelled_caught
            finally:
                await until_so(lambda: admission.num_running + admission.num_waiting == num_guests)
                assert [guest.ends for guest in guests] == [[]] * num_guests

    await at_every_instruction(then, run)


def request_of(admission: Admission, work: Callable[[Place], None]) -> OffloadRequest:
    """A request that does ``work`` in a place."""

    @contextmanager
    def entered(place: Place) -> Iterator[None]:
        work(place)
        yield

    return OffloadRequest(
        lambda *_: Request(lambda: None, entered),
        admission,
        OutcomeCounter(),
        request_id="torn",
        priority=0,
        deadline_s=None,
    )
