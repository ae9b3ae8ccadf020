"""What `run` can be given: plain callables. Anything else is refused, typed, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

import streamflow
from streamflow.errors import UnsuitableWorkError
from tests.streamflow.runtime.kit import make_subject

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


async def asynchronous() -> None:
    pytest.fail("it ran")


async def generator() -> AsyncIterator[int]:
    pytest.fail("it ran")
    yield 1


class AsyncCallable:
    async def __call__(self) -> None:
        pytest.fail("it ran")

    async def method(self) -> None:
        pytest.fail("it ran")


UNSUITABLE: dict[str, tuple[Any, str]] = {
    "a number": (3, "not callable"),
    "None": (None, "not callable"),
    "an async function": (asynchronous, "async function"),
    "a partial of one": (partial(asynchronous), "async function"),
    "a partial of a partial": (partial(partial(asynchronous)), "async function"),
    "an async generator": (generator, "async function"),
    "an object with an async call": (AsyncCallable(), "async function"),
    "an async method": (AsyncCallable().method, "async function"),
    "a function that returns a coroutine": (lambda: asynchronous(), "returned a coroutine"),
}


@pytest.mark.parametrize("name", UNSUITABLE)
async def test_it_is_refused(name: str) -> None:
    work, problem = UNSUITABLE[name]
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        with pytest.raises(UnsuitableWorkError, match=problem) as caught:
            await offload.run(work)
        assert isinstance(caught.value, TypeError)
        assert caught.value.work == repr(work)
        assert "await offload.run(model, inputs)" in str(caught.value)
        await subject.check_next(offload)


async def test_a_coroutine_is_refused_and_told_from_a_function() -> None:
    """The mistake of ``run(work())``."""
    subject = make_subject()
    coroutine = asynchronous()
    async with streamflow.open_offload(subject.model) as offload:
        with pytest.raises(UnsuitableWorkError, match="not callable"):
            await offload.run(coroutine)  # type: ignore[arg-type]
        await subject.check_next(offload)
    coroutine.close()


class Callee:
    def __call__(self, a: int, *, b: int) -> int:
        return a + b


CALLABLES: list[Callable[..., int]] = [lambda a, b: a + b, Callee(), partial(Callee(), b=2), Callee().__call__]


@pytest.mark.parametrize("work", CALLABLES, ids=["lambda", "object", "partial", "method"])
async def test_plain_callables_get_their_arguments(work: Callable[..., int]) -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        assert await offload.run(work, 1, b=2) == 3


async def test_the_model_itself_is_one() -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        out = await offload.run(subject.model, subject.inputs)
        assert out.shape == subject.inputs.shape
