"""What the caller has in force is in force inside `run`, and nothing of it reaches the next request."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest
import torch

import streamflow
from streamflow.errors import GradientError
from streamflow.stages.callers import CallerContext
from tests.streamflow.kit import sha256_of
from tests.streamflow.runtime.kit import make_subject

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("REQUEST_ID", default="nobody's")


@attrs.frozen
class InForce:
    """What a thread has in force."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    default_device: str
    made_on: str
    request_id: str

    @classmethod
    def here(cls) -> InForce:
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=torch.is_autocast_enabled("cpu"),
            autocast_dtype=torch.get_autocast_dtype("cpu"),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=str(torch.get_default_device()),
            made_on=str(torch.zeros(1).device),
            request_id=REQUEST_ID.get(),
        )


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """As a program sets it, for good."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def request_id(value: str) -> Iterator[None]:
    token = REQUEST_ID.set(value)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


@contextmanager
def both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad-in-no_grad": lambda: both(torch.no_grad(), torch.enable_grad()),
    "inference_mode": torch.inference_mode,
    "inference_mode-off-inside": lambda: both(torch.inference_mode(), torch.inference_mode(False)),
    "autocast-bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast-float16-uncached": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast-off-inside": lambda: both(
        torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False)
    ),
    "set_default_device": lambda: default_device("meta"),
    "with-torch-device": lambda: torch.device("meta"),
    "with-torch-device-in-set_default_device": lambda: both(default_device("meta"), torch.device("cpu")),
    "contextvar": lambda: request_id("this one's"),
    "all": lambda: both(torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), request_id("all's")),
}


async def test_each_is_in_force_in_its_request_and_in_no_other() -> None:
    """All requests use the same thread, in every order of two."""
    subject = make_subject()
    threads: set[int] = set()

    def look() -> InForce:
        threads.add(threading.get_ident())
        return InForce.here()

    async with streamflow.open_offload(subject.model, {"max_running_requests": 1}) as offload:
        for first in CALLERS:
            for second in CALLERS:
                for name in (first, second):
                    with CALLERS[name]():
                        here = InForce.here()
                        assert await offload.run(look) == here, f"{name} of {first}, {second}"
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert InForce.here() == InForce.here()


async def test_what_the_work_sets_stays_in_its_request() -> None:
    """Work that forgets to reset what it set harms nobody."""
    subject = make_subject()

    def forget() -> None:
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        REQUEST_ID.set("forgotten")

    async with streamflow.open_offload(subject.model, {"max_running_requests": 1}) as offload:
        await offload.run(forget)
        assert await offload.run(InForce.here) == InForce.here()
        assert await offload.run(subject.forward) == subject.expected
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert await offload.run(InForce.here) == InForce.here()


@pytest.mark.parametrize("name", [name for name in CALLERS if "device" not in name and "grad" not in name])
async def test_the_forward_gives_what_it_gives_under_the_same_when_resident(name: str) -> None:
    subject = make_subject()

    def forward() -> str:
        with torch.set_grad_enabled(False) if not torch.is_inference_mode_enabled() else nullcontext():
            return sha256_of(subject.model(subject.inputs))

    with CALLERS[name]():
        context = CallerContext.capture()
        resident = await anyio.to_thread.run_sync(lambda: context.run(forward))
        async with streamflow.open_offload(subject.model) as offload:
            assert await offload.run(forward) == resident
            assert await offload.run(forward) == resident
    assert (resident == subject.expected) == ("bfloat16" not in name and "float16" not in name and name != "all")


@pytest.mark.parametrize("name", [name for name in CALLERS if "device" in name or "inference" in name])
@pytest.mark.parametrize("options", [{"resident_blocks": 2}, {"transfer": "staged", "packing_threads": 1}])
async def test_what_the_opener_has_in_force_does_not_reach_the_engine(name: str, options: dict[str, Any]) -> None:
    """The engine works on the opener's thread: its buffers and views are what they are, whatever the default is."""
    subject = make_subject()

    def forward() -> str:
        with torch.device("cpu"):
            return subject.forward()

    with CALLERS[name]():
        async with streamflow.open_offload(subject.model, options) as offload:
            assert await offload.run(forward) == subject.expected
            assert await offload.run(forward) == subject.expected
    subject.before.assert_unchanged(subject.model)
    assert subject.forward() == subject.expected


async def test_gradients_are_refused_by_the_callers_mode() -> None:
    subject = make_subject()
    inputs = subject.inputs.clone().requires_grad_()

    def forward() -> torch.Tensor:
        out: torch.Tensor = subject.model(inputs)
        return out

    async with streamflow.open_offload(subject.model) as offload:
        with pytest.raises(GradientError):
            await offload.run(forward)
        with torch.no_grad():
            assert sha256_of(await offload.run(forward)) == subject.expected
        with torch.inference_mode():
            assert (await offload.run(forward)).is_inference()
        await subject.check_next(offload)


async def test_work_may_run_a_loop_of_its_own() -> None:
    """The caller's loop does not run in the request's thread, and nothing says that it does."""
    subject = make_subject()

    async def answer() -> int:
        await anyio.lowlevel.checkpoint()
        return 42

    async with streamflow.open_offload(subject.model) as offload:
        for backend in ("asyncio", "trio"):
            assert await offload.run(partial(anyio.run, answer, backend=backend)) == 42
        await subject.check_next(offload)


async def test_work_may_call_back_into_the_loop() -> None:
    """As progress callbacks do."""
    subject = make_subject()
    heard: list[int] = []

    async def report(step: int) -> None:
        assert threading.get_ident() == loop_thread
        heard.append(step)

    def work() -> str:
        subject.script.between = lambda index: anyio.from_thread.run(report, index)
        return subject.forward()

    loop_thread = threading.get_ident()
    async with streamflow.open_offload(subject.model) as offload:
        assert await offload.run(work) == subject.expected
        await subject.check_next(offload)
    assert heard == list(range(subject.num_blocks + 1))
