"""What a request can run: plain callables, that do their work before they return."""

from __future__ import annotations

import inspect
from typing import TypeVar

from streamflow.errors import UnsuitableWorkError

Result = TypeVar("Result")


def check_work(work: object) -> None:
    """Return if ``work`` may be called in a thread.

    :raises UnsuitableWorkError: if it is no callable, or an async one.
    """
    if not callable(work):
        raise UnsuitableWorkError(work, "is not callable")
    for function in (work, getattr(work, "__call__", None)):  # noqa: B004 - objects with an async __call__
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UnsuitableWorkError(work, "is an async function, which nobody would await there")


def check_result(work: object, result: Result) -> Result:
    """``result``, which ``work`` returned.

    :raises UnsuitableWorkError: if it is a coroutine: the work is not done, and the thread has no loop to do it.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise UnsuitableWorkError(work, "returned a coroutine, which nobody would await there")
    return result
