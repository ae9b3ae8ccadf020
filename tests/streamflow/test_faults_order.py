"""Known faults of order and lifetime: too early, too late, in another order, with copies still under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import streamflow
from streamflow.errors import AlreadyAttachedError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.events import FetchIssued
from streamflow.stages.images import MemoryPiece
from streamflow.weights.adapters import TensorAdapter
from tests.streamflow.devices import GatedCpuDevice
from tests.streamflow.kit import (
    ModelState,
    aligned_reference,
    compare,
    resident_digests,
    run_calls,
    save_checkpoint,
    sha256_of,
    stream_and_compare,
)
from tests.streamflow.models import (
    CALLS,
    WIDTH,
    Bare,
    Call,
    Case,
    Mlp,
    Scheduled,
    block,
    blocks_of,
    mlp_stack,
    seeded,
    some_inputs,
)

pytestmark = pytest.mark.anyio

X = some_inputs(1)[0]


def scheduled(num_blocks: int = 6) -> nn.Module:
    return seeded(lambda: Scheduled(num_blocks))


async def test_a_bare_parameter_beside_the_blocks_is_there_before_any_copy_of_a_block(tmp_path: Path) -> None:
    save_checkpoint(seeded(Bare), tmp_path)
    model, device = seeded(Bare), GatedCpuDevice()
    expected = resident_digests(model, CALLS)
    async with streamflow.open_streamed(lambda: seeded(Bare), tmp_path, device=device) as (offload, streamed):
        with device.gated():
            assert offload.statistics().fixed_bytes == 256
            assert torch.equal(streamed.gain, model.gain)  # type: ignore[arg-type]
        await compare(offload, streamed, CALLS, expected)


async def test_a_block_prefetched_but_not_run_leaves_the_window_sound() -> None:
    """Its copy is still under way when the pass ends, and when the next pass wants other blocks."""
    model, device = scheduled(), GatedCpuDevice()
    calls: list[Call] = [(X, (0,)), (X, (4, 5)), (X, range(6))]
    expected = resident_digests(model, calls)
    async with streamflow.open_offload(
        model, {"window_blocks": 2, "poison_freed_slots": True}, device=device
    ) as offload:
        with device.gated():
            device.allow(1)
            first = await offload.run(run_calls, model, calls[:1])
            assert offload.statistics().engine.num_fetches >= 2  # block 1 is under way and cannot arrive
        rest = await offload.run(run_calls, model, calls[1:])
    assert [sha256_of(output) for output in first + rest] == expected


async def test_closing_waits_for_the_copy_of_a_block_that_never_ran() -> None:
    """The copy is let go only once closing asks the stream for its end; no buffer may be freed under it before."""
    model, device = scheduled(), GatedCpuDevice()
    before = ModelState.of(model)
    async with streamflow.open_offload(model, {"window_blocks": 2}, device=device) as offload:
        device.allow(1)
        await offload.run(run_calls, model, [(X, (0,))])
        num_pending, device.on_record = device.num_pending, device.allow_all
    assert num_pending > 0
    assert len(device.pending_at_free) >= 2
    assert set(device.pending_at_free) == {0}
    before.assert_unchanged(model, in_place=False)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
async def test_step_caches_that_run_only_the_first_and_last_blocks_on_some_steps(window: int) -> None:
    full, part = tuple(range(6)), (0, 5)
    calls = tuple((X, schedule) for schedule in (full, part, part, full, part, full))
    await stream_and_compare(Case("step cache", scheduled, calls), {"window_blocks": window})


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
async def test_the_second_request_finds_block_0_although_the_last_pass_evicted_it(num_blocks: int) -> None:
    model = scheduled(num_blocks)
    calls: list[Call] = [(X, range(num_blocks))]
    expected = resident_digests(model, calls)
    async with streamflow.open_offload(model, {"window_blocks": 1, "poison_freed_slots": True}) as offload:
        for _ in range(4):
            outputs = await offload.run(run_calls, model, calls)
            assert [sha256_of(output) for output in outputs] == expected


@settings(max_examples=20)
@given(
    schedules=st.lists(st.lists(st.integers(0, 5), max_size=12), min_size=1, max_size=4),
    window=st.integers(1, 4),
    residents=st.integers(0, 5),
    transfer=st.sampled_from(["auto", "staged"]),
)
def test_any_blocks_in_any_order_are_exact(
    schedules: list[list[int]], window: int, residents: int, transfer: str
) -> None:
    calls = tuple((X, tuple(schedule)) for schedule in schedules)
    options = {"window_blocks": window, "resident_blocks": residents, "transfer": transfer, "packing_threads": 2}
    anyio.run(stream_and_compare, Case("any", scheduled, calls), options, backend="asyncio")


async def test_a_conversion_on_the_way_to_the_slot_is_done_before_the_block_runs(tmp_path: Path) -> None:
    """The files hold float32; an adapter makes every streamed bfloat16 tensor whenever its block is fetched."""
    wide = seeded(Bare)
    save_checkpoint(wide, tmp_path)
    narrow = seeded(Bare).to(torch.bfloat16)
    expected = resident_digests(narrow, CALLS)
    adapter = TensorAdapter("*", transform=lambda tensors: tensors[0].to(torch.bfloat16))
    options = {"poison_freed_slots": True}
    opened = streamflow.open_streamed(
        lambda: seeded(lambda: Bare(torch.bfloat16)), tmp_path, options, adapters=[adapter]
    )
    async with opened as (offload, streamed):
        await compare(offload, streamed, CALLS, expected)
        statistics = offload.statistics()
    assert statistics.choice.source == "checkpoint"
    assert statistics.engine.num_fetches >= 4 + 5 * 2


class Lingering(nn.Module):
    """Blocks that compute only after ``pause``, which is told their number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(index) for index in range(6))

    class Block(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.inner = index, Mlp()

        def forward(self, x: torch.Tensor, pause: Callable[[int], None]) -> torch.Tensor:
            pause(self.index)
            out: torch.Tensor = self.inner(x)
            return out

    def forward(self, x: torch.Tensor, pause: Callable[[int], None] = lambda index: None) -> torch.Tensor:
        for lingering in self.blocks:
            x = lingering(x, pause)
        return x


@pytest.mark.parametrize("window", [1, 2, 3])
async def test_a_weight_is_not_replaced_while_its_block_still_computes(window: int) -> None:
    """While block i lingers, the engine fills the other slots, with blocks up to i + window - 1, and there it waits."""
    model = seeded(Lingering)
    expected = resident_digests(model, [(X,)])
    filled = threading.Condition()
    num_filled = 0
    started = anyio.Event()

    async def watch(offload: streamflow.Offload) -> None:
        nonlocal num_filled
        with offload.observe() as events:
            num_filled = offload.statistics().engine.num_fetches
            started.set()
            async for event in events:
                if isinstance(event, FetchIssued):
                    await anyio.to_thread.run_sync(event.event.wait)
                    with filled:
                        num_filled += 1
                        filled.notify_all()

    def pause(index: int) -> None:
        with filled:
            assert filled.wait_for(lambda: num_filled >= index + window, timeout=20)
        assert offload.statistics().engine.num_fetches == index + window

    async with (
        streamflow.open_offload(model, {"window_blocks": window, "poison_freed_slots": True}) as offload,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(watch, offload)
        await started.wait()
        outputs = await offload.run(run_calls, model, [(X, pause)])
        tasks.cancel_scope.cancel()
    assert [sha256_of(output) for output in outputs] == expected


async def test_a_staging_buffer_is_not_refilled_while_the_copy_from_it_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One packing thread has two buffers: with every copy held back it can pack two chunks and no third one."""
    packed = threading.Condition()
    num_packed = 0
    read_into = MemoryPiece.read_into

    def count(piece: MemoryPiece, address: int, start: int, nbytes: int) -> None:
        nonlocal num_packed
        read_into(piece, address, start, nbytes)
        with packed:
            num_packed += 1
            packed.notify_all()

    def wait_for(number: int, timeout_s: float) -> bool:
        with packed:
            return packed.wait_for(lambda: num_packed >= number, timeout_s)

    case = Case("mlp", lambda: seeded(lambda: Bare()), CALLS)
    model, device = case.build(), GatedCpuDevice()
    expected = resident_digests(model, CALLS)
    monkeypatch.setattr(MemoryPiece, "read_into", count)
    options = {"transfer": "staged", "packing_threads": 1, "staging_chunk_bytes": 256}
    async with (
        streamflow.open_offload(model, options, device=device) as offload,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(compare, offload, model, CALLS, expected)
        with device.gated():
            assert await anyio.to_thread.run_sync(wait_for, 2, 20)
            assert not await anyio.to_thread.run_sync(wait_for, 3, 0.1)
            device.allow(1)
            assert await anyio.to_thread.run_sync(wait_for, 3, 20)


async def test_opening_and_closing_many_times_keeps_the_weights() -> None:
    """Staging out twice, or without having run, must not drop the host's copy."""
    model = mlp_stack(4)
    expected = resident_digests(model, CALLS)
    before = ModelState.of(model)
    for num_runs in (0, 1, 0, 2):
        device = CpuDevice()
        async with streamflow.open_offload(model, device=device) as offload:
            for _ in range(num_runs):
                await compare(offload, model, CALLS, expected)
        assert device.memory().in_use == 0
        before.assert_unchanged(model)
    assert [sha256_of(output) for output in run_calls(model, CALLS)] == expected


async def test_closing_what_was_started_twice_keeps_the_weights() -> None:
    model = mlp_stack(4)
    before = ModelState.of(model)
    started = await streamflow.start_offload(model)
    with torch.no_grad():
        await started.run(model, *CALLS[0])
    await started.aclose()
    await started.aclose()
    assert started.state == "closed"
    before.assert_unchanged(model)


async def test_no_placeholder_is_taken_for_a_weight_when_two_tasks_open_at_once() -> None:
    """The second one must not take an inventory of what the first one shows in the meantime."""
    model = mlp_stack(4)
    expected = resident_digests(model, CALLS)
    before = ModelState.of(model)
    outcomes: list[str] = []

    async def open_and_run() -> None:
        try:
            async with streamflow.open_offload(model, {"poison_freed_slots": True}) as offload:
                await compare(offload, model, CALLS, expected)
        except streamflow.StreamflowError as failure:
            outcomes.append(type(failure).__name__)
        else:
            outcomes.append("exact")

    async def open_again_and_again() -> None:
        for _ in range(6):
            await open_and_run()
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(open_again_and_again)
    assert set(outcomes) == {"exact", "AlreadyAttachedError"}
    assert outcomes.count("exact") >= 6
    before.assert_unchanged(model)


def test_no_placeholder_is_taken_for_a_weight_when_two_threads_open_at_once() -> None:
    model = mlp_stack(4)
    expected = sha256_of(run_calls(aligned_reference(model), CALLS[:1]))
    before = ModelState.of(model)
    opened, outcomes = threading.Barrier(2), []

    def open_and_run() -> None:
        opened.wait(20)
        try:
            with streamflow.offload(model):
                outcomes.append(sha256_of(run_calls(model, CALLS[:1])))
                opened.wait(20)
        except streamflow.StreamflowError as failure:
            outcomes.append(type(failure).__name__)
            opened.wait(20)

    threads = [threading.Thread(target=open_and_run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == sorted(["AlreadyAttachedError", expected])
    before.assert_unchanged(model)


async def test_a_weight_that_another_model_holds_is_not_taken_from_its_placeholder() -> None:
    """Two models that share one parameter, and no module: the second is refused by the parameter's name."""
    first, second = mlp_stack(3), mlp_stack(4)
    block(second, 2).up.weight = block(first, 2).up.weight
    expected = resident_digests(second, CALLS)
    before = ModelState.of(second)
    async with streamflow.open_offload(first):
        held = ModelState.of(second)
        with pytest.raises(AlreadyAttachedError, match=r"Stack\.blocks\.2\.up\.weight is attached"):
            async with streamflow.open_offload(second):
                raise AssertionError("it was opened")
        held.assert_unchanged(second)
    before.assert_unchanged(second)
    async with streamflow.open_offload(second) as offload:
        await compare(offload, second, CALLS, expected)


def test_the_kit_is_wide_enough_to_notice_a_wrong_weight() -> None:
    """Every byte of a block's weights changes what the model gives: else nothing here would show anything."""
    model = mlp_stack(2)
    expected = resident_digests(model, CALLS)
    for parameter in blocks_of(model).parameters():
        wrong = parameter.flatten()
        keep = wrong[WIDTH // 2].clone()
        wrong[WIDTH // 2] = keep + 1
        assert resident_digests(model, CALLS) != expected
        wrong[WIDTH // 2] = keep
    assert resident_digests(model, CALLS) == expected
