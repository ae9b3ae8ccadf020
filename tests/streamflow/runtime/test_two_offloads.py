"""Two models on one device, each with an offload of its own, share the link's bytes; neither holds the other up."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch
from torch import nn

import streamflow
from streamflow import Offload
from streamflow.stages import links
from streamflow.stages.devices.cpu import CpuDevice, ModelledLink
from streamflow.stages.events import EngineFailed, FetchStarted, ObservedEvent
from tests.streamflow.kit import resident_digests, sha256_of
from tests.streamflow.models import mlp_stack, some_inputs
from tests.streamflow.runtime.kit import PATIENCE_S, until_so

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

BYTES_PER_S = 8e6


class Weights(nn.Module):
    """A block of so many bytes that computes nothing."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nbytes, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0]


class Transfers(nn.Module):
    """A model whose forwards take as long as its transfers."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Weights(nbytes) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


async def test_small_blocks_get_as_many_bytes_as_large_ones() -> None:
    link = ModelledLink(BYTES_PER_S)
    small, large = Transfers(40_000), Transfers(160_000)
    with torch.no_grad():
        async with (
            streamflow.open_offload(small, {"window_blocks": 5}, device=CpuDevice(link=link)) as first,
            streamflow.open_offload(large, {"window_blocks": 5}, device=CpuDevice(link=link)) as second,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(keep_on, second, large)
            await second_is_busy(second)
            before = streamed(first), streamed(second)
            for _ in range(8):
                await first.run(small, torch.zeros(1))
            got = [now - then for now, then in zip((streamed(first), streamed(second)), before, strict=True)]
            tasks.cancel_scope.cancel()
    assert 0.6 < got[0] / got[1] < 1.6, f"{got[0]} bytes for the small blocks and {got[1]} for the large ones"
    assert links._arbiters == {}


async def second_is_busy(offload: Offload) -> None:
    with offload.observe() as events:
        async for event in events:
            if isinstance(event, FetchStarted):
                return


async def keep_on(offload: Offload, model: nn.Module) -> None:
    while True:
        await offload.run(model, torch.zeros(1))


def streamed(offload: Offload) -> int:
    return offload.statistics().engine.streamed_bytes


async def test_both_are_exact_and_one_goes_on_when_the_other_closes() -> None:
    link = ModelledLink(1e8)
    models, (x,) = [mlp_stack(3), mlp_stack(5)], some_inputs(1)
    expected = [resident_digests(model, [(x,)])[0] for model in models]
    with torch.no_grad():
        async with streamflow.open_offload(models[0], {"window_blocks": 1}, device=CpuDevice(link=link)) as outer:
            async with (
                streamflow.open_offload(models[1], {"window_blocks": 1}, device=CpuDevice(link=link)) as inner,
                anyio.create_task_group() as tasks,
            ):
                for offload, model, digest in zip((outer, inner), models, expected, strict=True):
                    for _ in range(6):
                        tasks.start_soon(partial(exact, offload, model, x, digest))
            for _ in range(3):
                await exact(outer, models[0], x, expected[0])
    assert links._arbiters == {}


async def exact(offload: Offload, model: nn.Module, x: torch.Tensor, digest: str) -> None:
    assert sha256_of(await offload.run(model, x)) == digest


async def test_one_that_breaks_while_it_is_idle_leaves_the_link_to_the_other() -> None:
    """Turns that it had, and would never give back, must not keep others waiting."""
    link = ModelledLink(1e8)
    models, (x,) = [mlp_stack(3), mlp_stack(5)], some_inputs(1)
    (expected,) = resident_digests(models[1], [(x,)])
    with torch.no_grad():
        async with (
            streamflow.open_offload(models[0], {"window_blocks": 2}, device=CpuDevice(link=link)) as broken,
            streamflow.open_offload(models[1], {"window_blocks": 2}, device=CpuDevice(link=link)) as other,
        ):
            (arbiter,) = links._arbiters.values()
            await until_so(lambda: len(arbiter._users) == 2)
            broken.fail(OSError("the file is gone"))
            await until_so(lambda: len(arbiter._users) == 1)
            await exact(other, models[1], x, expected)


async def test_a_failure_that_a_thread_reports_is_told_on_the_loop() -> None:
    failure, told = OSError("the device is gone"), list[ObservedEvent]()

    async def listen(offload: Offload, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with offload.observe() as events:
            task_status.started()
            async for event in events:
                told.append(event)

    async with streamflow.open_offload(mlp_stack(3), {"device": "cpu"}) as offload, anyio.create_task_group() as tasks:
        await tasks.start(listen, offload)
        await until_so(lambda: offload.statistics().engine.num_fetches > 0)
        await anyio.wait_all_tasks_blocked()  # the observer among them
        await anyio.to_thread.run_sync(offload.fail, failure)
        with anyio.fail_after(PATIENCE_S):
            while EngineFailed(failure) not in told:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
