"""Progress reaches the listener of whoever began the work, from the tasks and threads that do it, and nobody else's."""

from __future__ import annotations

import pytest
import torch

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.progress import progress, progress_to, tracked
from streamflow.stages.threads import open_threads
from streamflow.tools.bench.sleeping import SleepingModel

pytestmark = pytest.mark.anyio


async def test_work_in_threads_and_tasks_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    with progress_to(lambda *values: told.append(values)):
        async with open_threads() as crew:
            await crew.call(lambda: progress("work", 1, 2))
    progress("work", 2, 2)
    assert told == [("work", 1, 2)]


def test_the_inner_listener_is_the_one_that_is_told() -> None:
    outer: list[int] = []
    inner: list[int] = []
    with progress_to(lambda what, done, total: outer.append(done)):
        with progress_to(lambda what, done, total: inner.append(done)):
            assert list(tracked("work", "ab")) == ["a", "b"]
        assert list(tracked("none", ())) == []
        progress("work", 5, 6)
    assert (outer, inner) == ([5], [0, 1, 2])


class AcceleratorLike(CpuDevice):
    """A cpu device that takes itself for an accelerator: images are page-locked for it."""

    is_host = False


async def test_opening_tells_what_it_does() -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    model = SleepingModel(5, 1024, 0.0)
    before = model.blocks[0].weight.clone()
    with progress_to(lambda what, done, total: told.setdefault(what, []).append((done, total))):
        async with streamflow.open_offload(model, {"resident_blocks": 2, "device": "cpu"}, device=AcceleratorLike()):
            pass
    assert told["loading resident blocks"] == [(0, 2), (1, 2), (2, 2)]
    assert told["page-locking blocks"][-1] == (5, 5)
    assert torch.equal(model.blocks[0].weight, before)
