"""The same work on many things, by several threads of a crew."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from streamflow.stages.threads import ThreadCrew, open_tasks

Item = TypeVar("Item")


async def for_each(
    items: Sequence[Item], work: Callable[[Item], object], crew: ThreadCrew, num_threads: int, *, name: str = "helper"
) -> None:
    """Call ``work`` for each of ``items``, begun in their order, by up to ``num_threads`` threads.

    A cancelled call, or one whose ``work`` fails, begins no more of them and ends once those that were begun are done;
    the first failure is raised.
    """
    failures: list[Exception] = []
    cancelled: list[bool] = []
    indices = itertools.count()  # next() is one step to Python's threads: each is given out once

    def run() -> None:
        while (index := next(indices)) < len(items) and not (failures or cancelled):
            try:
                work(items[index])
            except Exception as failure:
                failures.append(failure)

    call = partial(crew.call, run, on_cancel=lambda: cancelled.append(True), name=name)
    async with open_tasks() as threads:
        for _ in range(min(num_threads, len(items))):
            threads.start_soon(call)
    if failures:
        raise failures[0]
