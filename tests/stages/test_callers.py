"""What the caller had in force is in force in the worker thread, and gone from it afterwards."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from streamflow.stages.callers import CallerContext
from streamflow.stages.threads import ThreadCrew, open_threads

pytestmark = pytest.mark.anyio

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


def modes() -> dict[str, Any]:
    """What torch has in force in the calling thread."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default device": torch.get_default_device(),
        "made on": torch.empty(1).device,
        "multiplied": torch.mm(torch.ones(1, 1, device="cpu"), torch.ones(1, 1, device="cpu")).dtype,
        "request": REQUEST.get(),
    }


async def around(crew: ThreadCrew, work: Callable[[], Any], caller: CallerContext) -> tuple[Any, Any, Any]:
    """In one worker thread: the modes before, what ``work`` returned with the caller's in force, the modes after."""
    return await crew.call(lambda: (modes(), caller.run(work), modes()))


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext,
    "no grad": torch.no_grad,
    "grad in no grad": lambda: nested(torch.no_grad(), torch.enable_grad()),
    "inference mode": torch.inference_mode,
    "grad in inference mode": lambda: nested(torch.inference_mode(), torch.enable_grad()),
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "no autocast in autocast": lambda: nested(torch.autocast("cpu"), torch.autocast("cpu", enabled=False)),
    "default device": lambda: torch.device("meta"),
    "all of them": lambda: nested(torch.no_grad(), torch.autocast("cpu", dtype=torch.float16), torch.device("meta")),
}


def nested(*contexts: AbstractContextManager[object]) -> AbstractContextManager[object]:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


@pytest.mark.parametrize("name", MODES)
async def test_a_mode_is_in_force_inside_and_gone_afterwards(name: str) -> None:
    async with open_threads() as crew:
        with MODES[name]():
            expected, caller = modes(), CallerContext.capture()
        before, inside, after = await around(crew, modes, caller)
    assert inside == expected
    assert before == after == modes()


async def test_the_modes_are_those_of_the_moment_of_capture() -> None:
    with torch.no_grad():
        caller = CallerContext.capture()
    assert torch.is_grad_enabled()
    async with open_threads() as crew:
        _, inside, _ = await around(crew, torch.is_grad_enabled, caller)
    assert inside is False


async def test_a_default_device_set_for_good_is_taken_along() -> None:
    torch.set_default_device("meta")
    try:
        caller = CallerContext.capture()
        async with open_threads() as crew:
            before, inside, after = await around(crew, lambda: torch.empty(1).device.type, caller)
    finally:
        torch.set_default_device(None)
    assert inside == "meta"
    assert before["made on"] == after["made on"] == torch.device("cpu")


async def test_context_variables_are_in_force_inside_and_what_is_set_there_stays_there() -> None:
    token = REQUEST.set("mine")
    try:
        caller = CallerContext.capture()
        async with open_threads() as crew:
            before, inside, after = await around(crew, lambda: (REQUEST.get(), REQUEST.set("inner")), caller)
        assert inside[0] == "mine"
        assert before["request"] == after["request"] != "inner"
        assert REQUEST.get() == "mine"
        assert caller.run(REQUEST.get) == "inner"
    finally:
        REQUEST.reset(token)


@pytest.mark.parametrize("failure", [ValueError("mine"), KeyboardInterrupt()])
async def test_what_was_in_force_before_is_restored_when_the_work_fails(failure: BaseException) -> None:
    def fail() -> None:
        raise failure

    def attempt() -> tuple[Any, BaseException | None, Any]:
        before, met = modes(), None
        try:
            caller.run(fail)
        except BaseException as error:
            met = error
        return before, met, modes()

    with MODES["all of them"]():
        caller = CallerContext.capture()
    async with open_threads() as crew:
        before, met, after = await crew.call(attempt)
    assert met is failure
    assert before == after


async def test_no_event_loop_is_said_to_run_in_the_worker_thread() -> None:
    async def which() -> tuple[int, str]:
        await anyio.lowlevel.checkpoint()
        return threading.get_ident(), REQUEST.get()

    caller = CallerContext.capture()
    async with open_threads() as crew:
        for backend in ("asyncio", "trio"):
            assert await crew.call(lambda backend=backend: caller.run(lambda: anyio.run(which, backend=backend)))  # type: ignore[misc]
        assert await crew.call(lambda: caller.run(lambda: asyncio.run(which())))


async def test_two_requests_have_their_own() -> None:
    with torch.no_grad():
        one = CallerContext.capture()
    other = CallerContext.capture()
    meet = threading.Barrier(2)

    def look() -> bool:
        meet.wait()
        seen = torch.is_grad_enabled()
        meet.wait()
        return seen

    seen: dict[str, bool] = {}

    async def call(name: str, caller: CallerContext) -> None:
        seen[name] = await crew.call(lambda: caller.run(look))

    async with open_threads() as crew, anyio.create_task_group() as tasks:
        tasks.start_soon(call, "one", one)
        tasks.start_soon(call, "other", other)
    assert seen == {"one": False, "other": True}


async def test_the_current_cuda_device_is_none_where_cuda_is_not_in_use() -> None:
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    assert CallerContext.capture().cuda_device == (torch.cuda.current_device() if in_use else None)
