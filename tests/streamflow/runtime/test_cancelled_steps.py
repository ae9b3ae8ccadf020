"""A cancellation at any checkpoint of opening, running and closing leaves nothing behind, or an exact next request."""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from torch import nn

import streamflow
from streamflow import Offload
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.testing.registrar import ScriptedRegistrar
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import ModelState, save_checkpoint, sha256_of, streamflow_threads
from tests.streamflow.models import seeded, some_inputs
from tests.streamflow.runtime.interrupts import Gate, gated_reads
from tests.streamflow.runtime.kit import (
    PATIENCE_S,
    CancelAt,
    Script,
    Scripted,
    Subject,
    by_scope,
    make_subject,
    natively,
    until,
)

pytestmark = pytest.mark.anyio

#: A cancellation later than this would find nothing: some part of the instrument is broken.
MAX_STEPS = 500


async def natively_thrice(coroutine: Coroutine[Any, Any, object], k: int) -> int:
    """At the k-th step and at the next two, which are those of the clean-up."""
    return await natively(coroutine, k, num_cancels=3)


WAYS = [
    pytest.param("asyncio", by_scope, id="asyncio-scope"),
    pytest.param("trio", by_scope, id="trio-scope"),
    pytest.param("asyncio", natively, id="asyncio-native"),
    pytest.param("asyncio", natively_thrice, id="asyncio-native-thrice"),
]
each_way = pytest.mark.parametrize(("anyio_backend", "cancel_at"), WAYS, indirect=["anyio_backend"])


async def at_every_step(
    cancel_at: CancelAt, work: Callable[[], Coroutine[Any, Any, object]], check: Callable[[], Awaitable[None]]
) -> int:
    """Cancel ``work`` at its first step, at its second, and so on, until it has none left. Returns how many it had."""
    for k in itertools.count(1):
        assert k < MAX_STEPS
        with anyio.fail_after(PATIENCE_S):
            num_steps = await cancel_at(work(), k)
            await check()
        if num_steps < k:
            return num_steps
    raise AssertionError("unreachable")


SETTINGS = [
    pytest.param(CpuDevice, {}, id="direct"),
    pytest.param(
        CpuDevice,
        {"transfer": "staged", "packing_threads": 2, "staging_chunk_bytes": 256, "resident_blocks": 2},
        id="staged-with-residents",
    ),
    pytest.param(FarCpuDevice, {"packing_threads": 2, "resident_blocks": 1}, id="pinned"),
]


@each_way
@pytest.mark.parametrize(("make_device", "options"), SETTINGS)
async def test_opening_running_and_closing(
    cancel_at: CancelAt, make_device: Callable[[], CpuDevice], options: dict[str, Any]
) -> None:
    subject = make_subject()
    device = make_device()
    outputs: list[str] = []

    async def work() -> None:
        async with streamflow.open_offload(subject.model, options, device=device) as offload:
            outputs.append(await offload.run(subject.forward))

    async def check() -> None:
        subject.check_restored(device, in_place=device.is_host)

    num_steps = await at_every_step(cancel_at, work, check)
    assert num_steps >= 8
    assert outputs
    assert set(outputs) == {subject.expected}


@each_way
@pytest.mark.parametrize(("make_device", "options"), SETTINGS)
async def test_running_alone(
    cancel_at: CancelAt, make_device: Callable[[], CpuDevice], options: dict[str, Any]
) -> None:
    subject = make_subject()
    device = make_device()
    async with streamflow.open_offload(subject.model, options, device=device) as offload:
        num_steps = await at_every_step(
            cancel_at, lambda: offload.run(subject.forward), lambda: subject.check_next(offload)
        )
        assert num_steps >= 2
    subject.check_restored(device, in_place=device.is_host)


@each_way
async def test_waiting_for_another_request(cancel_at: CancelAt) -> None:
    """A request that is cancelled in the queue leaves no hole there: those before and after it are served."""
    subject = make_subject()
    device = CpuDevice()

    async def work(offload: Offload) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload.run, subject.forward)
            await anyio.lowlevel.checkpoint()
            await offload.run(subject.forward)

    async with streamflow.open_offload(subject.model, device=device) as offload:
        await at_every_step(cancel_at, lambda: work(offload), lambda: subject.check_next(offload))
    subject.check_restored(device)


async def test_packing_stops_after_the_blocks_that_it_is_at() -> None:
    """Opening may pack for minutes; who cancels it does not wait for the rest."""
    subject, device = make_subject(num_blocks=9), FarCpuDevice()
    locked: list[int] = []
    device.registrar = ScriptedRegistrar(before_register=lambda: locked.append(1))
    with gated_reads() as gate, anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_open, subject, device)
            await until(gate.reached)
            scope.cancel()
            tasks.start_soon(_open_the_gate, gate)
    assert scope.cancelled_caught
    assert len(locked) <= 2
    subject.check_restored(device, in_place=False)


async def _open(subject: Subject, device: CpuDevice) -> None:
    async with streamflow.open_offload(subject.model, {"packing_threads": 2}, device=device):
        pytest.fail("it opened")


async def _open_the_gate(gate: Gate) -> None:
    """Once everybody has heard of the cancellation."""
    with anyio.CancelScope(shield=True):
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
    gate.open.set()


@each_way
@pytest.mark.parametrize("options", [{}, {"transfer": "staged", "packing_threads": 2, "resident_blocks": 1}])
async def test_opening_a_checkpoint(cancel_at: CancelAt, options: dict[str, Any], tmp_path: Path) -> None:
    subject = make_subject()
    save_checkpoint(subject.model, tmp_path)
    device = CpuDevice()
    opened: list[tuple[nn.Module, ModelState]] = []
    outputs: list[str] = []

    def finalize(model: nn.Module) -> None:
        opened.append((model.eval(), ModelState.of(model)))

    async def work() -> None:
        async with streamflow.open_streamed(
            lambda: seeded(lambda: Scripted(subject.num_blocks, Script())),
            tmp_path,
            options,
            finalize=finalize,
            device=device,
        ) as (offload, model):
            assert offload.statistics().choice.source == "checkpoint"
            outputs.append(sha256_of(await offload.run(model, some_inputs(1)[0])))

    async def check() -> None:
        for model, before in opened:
            before.assert_unchanged(model)
            assert all(parameter.is_meta for parameter in model.parameters())
        opened.clear()
        assert streamflow_threads() == subject.threads
        assert device.memory().in_use == 0
        assert not [target for target in open_files() if str(tmp_path) in target]

    num_steps = await at_every_step(cancel_at, work, check)
    assert num_steps >= 8
    assert set(outputs) == {subject.expected}


def open_files() -> list[str]:
    """What the open descriptors of this process stand for."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found
