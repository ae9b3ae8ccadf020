"""Models that keep state between calls are found, named, and used by one request at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import streamflow
from streamflow.errors import ConfigurationError, RefusedWhileAttachedError
from tests.streamflow.kit import aligned_reference, in_worker, sha256_of
from tests.streamflow.models import WIDTH, Mlp, Stack, seeded
from tests.streamflow.runtime.kit import PATIENCE_S, until, until_so

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]


class Remembering(nn.Module):
    """A block that adds what its last call saw, and lets others run in between."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.last: Any = None
        self.frames: list[Any] = [None]
        self.table: dict[str, Any] = {}
        self.keep: Callable[[Remembering, torch.Tensor], None] = lambda block, x: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keep(self, x)
        out: torch.Tensor = self.mlp(x)
        return out if self.last is None else out + self.last


def keep_tensor(block: Remembering, x: torch.Tensor) -> None:
    block.last = x * 0.5


def keep_in_list(block: Remembering, x: torch.Tensor) -> None:
    block.frames[0] = x.clone()


def keep_in_table(block: Remembering, x: torch.Tensor) -> None:
    block.table["last"] = x.clone()


def write_in_place(block: Remembering, x: torch.Tensor) -> None:
    if block.last is None:
        block.last = torch.zeros(WIDTH)
    block.last.add_(x.mean())


def count_calls(block: Remembering, x: torch.Tensor) -> None:
    block.frames = [len(block.table), *block.frames[:1]]
    block.table[str(len(block.table))] = 1


KEEPS = [keep_tensor, keep_in_list, keep_in_table, write_in_place, count_calls]


def keep_once(block: Remembering, x: torch.Tensor) -> None:
    if block.last is None:
        block.last = torch.ones(WIDTH)
        block.table["size"] = WIDTH


def remembering(keep: Callable[[Remembering, torch.Tensor], None]) -> Stack:
    model = seeded(lambda: Stack(Remembering() for _ in range(3)))
    assert isinstance(model, Stack)
    for block in model.blocks:
        block.keep = keep  # type: ignore[assignment]
    return model


@torch.no_grad()
def sample(model: nn.Module, start: float, num_steps: int = 4) -> str:
    x = torch.full((2, WIDTH), start)
    for _ in range(num_steps):
        x = x - 0.1 * model(x)
    return sha256_of(x)


@pytest.mark.parametrize("keep", KEEPS, ids=lambda keep: keep.__name__)
async def test_a_model_that_changes_attributes_in_a_forward_is_named_and_serialised(
    keep: Callable[[Remembering, torch.Tensor], None],
) -> None:
    model = remembering(keep)
    inside, most = list[int](), list[int]()

    def watched(start: float) -> None:
        sample(model, start)
        with torch.no_grad():
            inside.append(1)
            most.append(len(inside))
            model(torch.zeros(2, WIDTH))
            inside.pop()

    async with streamflow.open_offload(model) as offload:
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(offload.run, watched, float(number))
        statistics = offload.statistics()
    assert [name.split(":")[0] for name in statistics.serialised_by] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all("a forward changes its attribute" in reason for reason in statistics.serialised_by)
    assert statistics.engine.num_walks == statistics.engine.num_passes == 6 * 5
    assert set(most) == {1}


async def test_requests_of_a_model_with_state_are_exact() -> None:
    """Each request's state is its own from its first step to its last, as if it had run in that order, alone."""
    model = remembering(keep_tensor)
    order: list[float] = []
    reference = aligned_reference(model)
    lock = threading.Lock()
    outputs: dict[float, str] = {}

    def request(start: float) -> None:
        with torch.no_grad():
            model(torch.full((2, WIDTH), start))
        with lock:
            order.append(start)
        outputs[start] = sample(model, start)

    async with streamflow.open_offload(model) as offload, anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(offload.run, request, float(number))
    with torch.no_grad():
        for start in order:
            in_worker(partial(reference, torch.full((2, WIDTH), start)))
            assert in_worker(partial(sample, reference, start)) == outputs[start]


async def test_a_cache_that_is_filled_once_is_no_state() -> None:
    model = remembering(keep_once)
    together = threading.Barrier(4, timeout=PATIENCE_S)
    async with streamflow.open_offload(model) as offload:
        await offload.run(sample, model, 0.0, 2)
        for block in model.blocks:
            block.keep = lambda block, x: together.wait()  # type: ignore[assignment]
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(offload.run, sample, model, 1.0, 2)
        assert offload.statistics().serialised_by == ()


def in_training() -> nn.Module:
    model = seeded(lambda: Stack([Mlp(), Mlp()]))
    model.norm = nn.BatchNorm1d(WIDTH)
    return model


def with_causal_cache() -> nn.Module:
    model = seeded(lambda: Stack([Mlp(), Mlp()]))
    model.exit._feat_map = [None]
    return model


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (in_training, "norm: a BatchNorm1d in training mode updates its running statistics"),
        (with_causal_cache, "exit: it keeps _feat_map, a cache of causal convolutions"),
    ],
)
async def test_what_is_known_to_keep_state_is_named_at_opening(build: Callable[[], nn.Module], named: str) -> None:
    model = build()
    async with streamflow.open_offload(model) as offload:
        assert offload.statistics().serialised_by == (named,)
    async with streamflow.open_offload(model, {"stateful_modules": ()}) as offload:
        assert offload.statistics().serialised_by == ()


async def test_modules_can_be_named_and_must_be_there() -> None:
    model = seeded(lambda: Stack([Mlp(), Mlp()]))
    async with streamflow.open_offload(model, {"stateful_modules": ("blocks.1.up",)}) as offload:
        assert offload.statistics().serialised_by == ("blocks.1.up: it is named in stateful_modules",)
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(offload.run, sample, model, 1.0)
        engine = offload.statistics().engine
        assert engine.num_walks == engine.num_passes
    with pytest.raises(ConfigurationError, match=r"no module 'blocks\.1\.upp'; there is blocks\.1\.up"):
        async with streamflow.open_offload(model, {"stateful_modules": ("blocks.1.upp",)}):
            pytest.fail("it opened")


async def test_a_request_that_waits_for_the_model_can_be_cancelled() -> None:
    model = seeded(lambda: Stack([Mlp(), Mlp()]))
    holding, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        sample(model, 1.0, 1)
        holding.set()
        assert let_go.wait(PATIENCE_S)

    async with streamflow.open_offload(model, {"stateful_modules": ("blocks.1",)}) as offload:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload.run, hold)
            await anyio.to_thread.run_sync(holding.wait, PATIENCE_S)
            with anyio.move_on_after(0.05) as scope:
                await offload.run(sample, model, 1.0, 1)
            assert scope.cancelled_caught
            let_go.set()
        await offload.run(sample, model, 1.0, 1)


async def test_requests_get_the_model_in_the_order_in_which_they_came_to_it() -> None:
    """One that gives up holds up nobody."""
    model = seeded(lambda: Stack([Mlp(), Mlp()]))
    holding, let_go, order = threading.Event(), threading.Event(), list[int]()

    def hold() -> None:
        sample(model, 1.0, 1)
        holding.set()
        assert let_go.wait(PATIENCE_S)

    def come(number: int) -> None:
        sample(model, 1.0, 1)
        order.append(number)

    async def give_up(number: int) -> None:
        with scope:
            await offload.run(come, number)

    scope = anyio.CancelScope()
    options = {"stateful_modules": ("blocks.1",), "max_running_requests": 6}
    async with streamflow.open_offload(model, options) as offload:
        (gate,) = (component.gate for component in offload._workplace._gates.values())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload.run, hold)
            await until(holding)
            for number, start in enumerate([offload.run] * 2 + [give_up] + [offload.run] * 2):
                tasks.start_soon(start, *((number,) if start is give_up else (come, number)))
                await until_so(lambda number=number: len(gate._holding._waiting) == number + 1)  # type: ignore[misc]
            scope.cancel()
            await until_so(lambda: len(gate._holding._waiting) == 4)
            let_go.set()
        assert order == [0, 1, 3, 4]


class Caching(Stack):
    """A model with a switch for a cache over steps, as some libraries have it."""

    def enable_cache(self, config: object) -> None:
        raise AssertionError("it was enabled")


async def test_a_cache_over_steps_is_not_enabled_while_the_model_streams() -> None:
    model: Any = seeded(lambda: Caching([Mlp(), Mlp()]))
    async with streamflow.open_offload(model):
        with pytest.raises(RefusedWhileAttachedError, match="enabling a cache over denoising steps"):
            model.enable_cache(object())
