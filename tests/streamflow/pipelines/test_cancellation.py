"""A request that is cancelled, late or cut while it waits for a component, or uses one, leaves the next one exact."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import pytest
import torch

import streamflow
from streamflow import Offload
from streamflow.errors import DeadlineExceededError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import EngineClosedError
from tests.streamflow.kit import sha256_of
from tests.streamflow.pipelines.test_staged import TOKENS, expected, sizes_of
from tests.streamflow.pipelines.toys import ToyPipeline, toy_pipeline

pytestmark = pytest.mark.anyio


@attrs.frozen(eq=False)
class Occupied:
    """An offload in whose transformer, with all its blocks there, one request stands: no room for the VAE."""

    offload: Offload
    first: ToyPipeline
    other: ToyPipeline
    resident: str
    go_on: Callable[[], None]


@asynccontextmanager
async def occupied() -> AsyncIterator[Occupied]:
    """The first request stands between two steps until `go_on`; it must then end as if it had been alone."""
    first = toy_pipeline()
    other = ToyPipeline(**first.components)
    resident = expected(first)
    always, moving = await anyio.to_thread.run_sync(partial(sizes_of, first, resident_blocks="all"))
    options = {"resident_blocks": "all", "device_budget_bytes": always + moving["transformer"] + 1}
    stands, may_go = threading.Event(), threading.Event()

    def between(what: str) -> None:
        if what == "step 1":
            stands.set()
            assert may_go.wait(30)

    async with streamflow.open_offload(first, options, device=CpuDevice()) as offload:
        first.between = between
        results: list[torch.Tensor] = []

        async def run() -> None:
            results.append(await offload.run(first, TOKENS))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while not stands.is_set():
                await anyio.lowlevel.checkpoint()
            try:
                yield Occupied(offload, first, other, resident, may_go.set)
            finally:
                may_go.set()
        assert [sha256_of(result) for result in results] == [resident]
        assert sha256_of(await offload.run(other, TOKENS)) == resident


async def until_somebody_waits(offload: Offload) -> None:
    while (staging := offload.statistics().staging) is None or staging.num_waiting == 0:
        await anyio.lowlevel.checkpoint()


async def test_a_request_is_cancelled_while_it_waits_for_room() -> None:
    with anyio.fail_after(30):
        async with occupied() as given:
            with anyio.CancelScope() as scope:

                async def cancel() -> None:
                    await until_somebody_waits(given.offload)
                    scope.cancel()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(cancel)
                    await given.offload.run(given.other, TOKENS)
            assert scope.cancelled_caught
            staging = given.offload.statistics().staging
            assert staging is not None


async def test_a_request_that_waits_for_room_keeps_its_deadline() -> None:
    with anyio.fail_after(30):
        async with occupied() as given:
            with pytest.raises(DeadlineExceededError):
                await given.offload.request(deadline_s=0.2).run(given.other, TOKENS)


@pytest.mark.parametrize("where", ["encoder", "vae"])
async def test_a_request_is_cancelled_inside_a_component(where: str) -> None:
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    inside, may_go = threading.Event(), threading.Event()
    module = pipeline.text_encoder if where == "encoder" else pipeline.vae.decoder

    def stand(*_: object) -> None:
        inside.set()
        assert may_go.wait(30)

    with anyio.fail_after(30):
        async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
            handle = module.register_forward_pre_hook(stand)
            with anyio.CancelScope() as scope:

                async def cancel() -> None:
                    while not inside.is_set():
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
                    may_go.set()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(cancel)
                    await offload.run(pipeline, TOKENS)
            handle.remove()
            assert scope.cancelled_caught
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident


async def test_closing_cuts_a_request_that_waits_for_room() -> None:
    first = toy_pipeline()
    always, moving = await anyio.to_thread.run_sync(partial(sizes_of, first, resident_blocks="all"))
    options = {"resident_blocks": "all", "device_budget_bytes": always + moving["transformer"] + 1}
    other = ToyPipeline(**first.components)
    stands, device = threading.Event(), CpuDevice()
    leaving = threading.Event()

    def between(what: str) -> None:
        if what == "step 1":
            stands.set()
            assert leaving.wait(30)

    first.between = between
    ends: list[type[BaseException]] = []

    async def run(offload: Offload, pipeline: ToyPipeline) -> None:
        try:
            await offload.run(pipeline, TOKENS)
        except EngineClosedError as closed:
            ends.append(type(closed))

    with anyio.fail_after(30):
        opened = streamflow.open_offload(first, options, device=device)
        async with anyio.create_task_group() as tasks, opened as offload:
            tasks.start_soon(run, offload, first)
            while not stands.is_set():
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(run, offload, other)
            await until_somebody_waits(offload)
            leaving.set()
    assert ends == [EngineClosedError, EngineClosedError]
    assert device.memory().in_use == 0
