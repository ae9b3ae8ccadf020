"""Different requests walk over the weights together, each exact, and one that leaves early disturbs nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import attrs
import pytest
import torch
from torch import nn

import streamflow
from streamflow import Offload
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.kit import aligned_reference, in_worker, sha256_of
from tests.streamflow.models import WIDTH, mlp_stack
from tests.streamflow.runtime.kit import PATIENCE_S, check_accounts, make_subject, wait_for

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

NUM_BLOCKS = 5
#: A walk starts when it is full, whatever the machine does meanwhile; no forward is watched first, alone.
TOGETHER: dict[str, Any] = {"admission_window_s": 30.0, "stateful_modules": (), "poison_freed_slots": True}


@attrs.frozen(eq=False)
class Sampling:
    """A small denoising loop: its latents, its steps, and whether each makes a second, guided pass."""

    rows: int
    num_steps: int
    guided: bool = False

    @torch.no_grad()
    def run(self, model: nn.Module, at_step: Callable[[int], object] = lambda step: None) -> str:
        x = torch.linspace(-1, 1, self.rows * WIDTH).reshape(self.rows, WIDTH)
        for step in range(self.num_steps):
            at_step(step)
            velocity = model(x)
            if self.guided:
                velocity = 2 * velocity - model(x * 0.5)
            x = x - velocity / (self.num_steps + step)
        return sha256_of(x)


def alone(model: nn.Module, samplings: list[Sampling]) -> list[str]:
    """What each gives on the resident model."""
    reference = aligned_reference(model)
    return in_worker(lambda: [sampling.run(reference) for sampling in samplings])


async def warm_up(offload: Offload, model: nn.Module) -> None:
    """The forwards that are watched for state, alone."""
    await offload.run(Sampling(1, 2).run, model)


@pytest.mark.parametrize(
    "options",
    [{}, {"window_blocks": 1}, {"transfer": "staged", "packing_threads": 1, "resident_blocks": 1}],
    ids=["direct", "one-slot", "staged"],
)
async def test_four_requests_of_different_shapes_share_every_fetch(options: dict[str, Any]) -> None:
    model, num_steps = mlp_stack(NUM_BLOCKS), 3
    samplings = [Sampling(rows, num_steps) for rows in (1, 3, 8, 20)]
    expected = alone(model, samplings)
    outputs: dict[int, str] = {}

    async def ask(offload: Offload, index: int) -> None:
        outputs[index] = await offload.run(samplings[index].run, model)

    device = CpuDevice()
    async with streamflow.open_offload(model, {**TOGETHER, **options}, device=device) as offload:
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for index in range(4):
                    tasks.start_soon(ask, offload, index)
        engine = offload.statistics().engine
    assert [outputs[index] for index in range(4)] == expected
    assert engine.num_passes == 4 * num_steps
    assert engine.num_walks == num_steps
    assert device.memory().in_use == 0


async def test_requests_of_other_steps_and_guidance_are_exact_whenever_they_meet() -> None:
    model = mlp_stack(NUM_BLOCKS)
    samplings = [
        Sampling(2, 5),
        Sampling(7, 2, guided=True),
        Sampling(1, 3),
        Sampling(4, 1),
        Sampling(5, 4, guided=True),
    ]
    expected = alone(model, samplings)
    outputs: dict[int, str] = {}

    async def ask(offload: Offload, index: int) -> None:
        outputs[index] = await offload.run(samplings[index].run, model)

    async with streamflow.open_offload(model, {"max_running_requests": 3, "poison_freed_slots": True}) as offload:
        for _ in range(4):
            async with anyio.create_task_group() as tasks:
                for index in range(len(samplings)):
                    tasks.start_soon(ask, offload, index)
            assert [outputs[index] for index in range(len(samplings))] == expected
        await check_accounts(offload, model.blocks)  # type: ignore[arg-type]


class OutOfMemory(MemoryError):
    """What a device says that has no room for one request's activations."""


@pytest.mark.parametrize("way", ["fails", "runs out of memory", "is cancelled", "ends"])
async def test_one_that_leaves_early_leaves_the_others_exact(way: str) -> None:
    subject = make_subject(NUM_BLOCKS)
    model, left, scope = subject.model, threading.Event(), anyio.CancelScope()
    staying = [Sampling(rows, 4) for rows in (2, 5, 6)]
    expected = alone(model, staying)
    outputs: dict[int, str] = {}
    in_block, leaver = threading.Event(), list[int]()

    def inside(index: int) -> None:
        if index == 2 and leaver == [threading.get_ident()]:
            in_block.set()
            if way == "fails":
                raise ZeroDivisionError
            if way == "runs out of memory":
                raise OutOfMemory
            if way == "is cancelled":
                wait_for(left)

    def leave(step: int) -> None:
        if step == 1:
            leaver.append(threading.get_ident())

    async def go(offload: Offload) -> None:
        with scope:
            try:
                await offload.run(Sampling(3, 2).run, model, leave)
            except (ZeroDivisionError, OutOfMemory):
                assert way in ("fails", "runs out of memory")

    async def cancel() -> None:
        await anyio.to_thread.run_sync(wait_for, in_block)
        scope.cancel()
        left.set()

    async def stay(offload: Offload, index: int) -> None:
        outputs[index] = await offload.run(staying[index].run, model)

    async with streamflow.open_offload(model, {"poison_freed_slots": True}) as offload:
        await warm_up(offload, model)
        subject.script.inside = inside
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go, offload)
            for index in range(3):
                tasks.start_soon(stay, offload, index)
            if way == "is cancelled":
                tasks.start_soon(cancel)
        assert [outputs[index] for index in range(3)] == expected
        assert scope.cancelled_caught == (way == "is cancelled")
        await subject.check_next(offload)


async def test_requests_are_in_one_block_at_the_same_time() -> None:
    subject = make_subject(NUM_BLOCKS)
    together = threading.Barrier(4, timeout=PATIENCE_S)
    async with streamflow.open_offload(subject.model, {"window_blocks": 1}) as offload:
        for _ in range(2):
            await offload.run(subject.forward)
        subject.script.inside = lambda index: together.wait()
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(partial(offload.run, subject.forward))
        await subject.check_next(offload)
