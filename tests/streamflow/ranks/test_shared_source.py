"""Ranks that have loaded the same model stream from one host copy: exact, page-locked on all or none, never mixed."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.devices import RegisteringDevice
from tests.streamflow.kit import ModelState, check_statistics, compare, resident_digests, run_calls, sha256_of
from tests.streamflow.models import CALLS, CASES, Case, mlp_stack
from tests.streamflow.ranks.agreeing import AgreeingRank, AgreeingRanks, on_ranks
from tests.streamflow.ranks.kit import descriptors_held, mappings_held, opened, raise_first

pytestmark = pytest.mark.anyio

CASE = Case("mlp", lambda: mlp_stack(6), CALLS)


async def stream_on(
    size: int, case: Case, *, devices: list[CpuDevice] | None = None, options: dict[str, Any] | None = None
) -> list[Any]:
    """Stream on that many ranks, and fail unless each is exact and has its model as before. Returns the statistics."""
    backends = devices or [CpuDevice() for _ in range(size)]

    async def work(rank: AgreeingRank) -> Any:
        model = case.build()
        expected, before = resident_digests(model, case.calls), ModelState.of(model)
        given = {"plan": case.plan, "poison_freed_slots": True, "packing_threads": 2, **(options or {})}
        async with opened(model, rank, given, backends[rank.rank]) as (offload, source):
            assert source.sharing.failure is None
            await compare(offload, model, case.calls, expected)
            statistics = offload.statistics()
            state = {name: sha256_of(tensor) for name, tensor in model.state_dict().items()}
        check_statistics(statistics, streams=case.streams)
        before.assert_unchanged(model, in_place=False)
        assert state == {name: sha256_of(tensor) for name, tensor in model.state_dict().items()}
        assert [sha256_of(output) for output in run_calls(model, case.calls)] == expected
        return statistics

    return raise_first(await on_ranks(AgreeingRanks(size), work))


# Streaming


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_every_model_streams_exactly_from_a_shared_copy(case: Case) -> None:
    for statistics in await stream_on(2, case):
        assert (statistics.choice.source, statistics.choice.transfer) == ("module", "direct")
        assert statistics.host_image_bytes == 0


@pytest.mark.parametrize(("size", "anyio_backend"), [(1, "trio"), (2, "asyncio"), (4, "trio")])
async def test_blocks_are_copied_from_where_they_lie_in_the_registered_copy(size: int) -> None:
    devices = [RegisteringDevice() for _ in range(size)]
    options = {"resident_blocks": 1, "registration_piece_bytes": 2 * mmap.PAGESIZE}
    for statistics in await stream_on(size, CASE, devices=devices, options=options):
        assert (statistics.choice.source, statistics.choice.transfer) == ("module", "direct")
        assert statistics.registration.registered_bytes >= statistics.block_bytes
        assert (statistics.engine.staging_bytes, statistics.host_image_bytes) == (0, 0)
    assert [device.script.registered for device in devices] == [{}] * size


async def test_what_was_written_after_closing_is_one_ranks_own() -> None:
    closed = AgreeingRanks(2)

    async def work(rank: AgreeingRank) -> str:
        model = CASE.build()
        async with opened(model, rank, {}, CpuDevice()):
            pass
        if rank.rank == 0:
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.zero_()
        await rank.agree("rank 0 has written", None)
        return sha256_of(list(model.parameters()))

    written, other = raise_first(await on_ranks(closed, work))
    assert other == sha256_of(list(CASE.build().parameters()))
    assert written != other


async def test_private_copies_of_the_weights_go() -> None:
    async def work(rank: AgreeingRank) -> None:
        model = CASE.build()
        copies = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
        async with opened(model, rank, {}, CpuDevice()):
            gc.collect()
            assert all(copy() is None for copy in copies)

    raise_first(await on_ranks(AgreeingRanks(2), work))


# Registration that one rank cannot have


@pytest.mark.parametrize("fails_at", [0, 2])
async def test_where_one_rank_cannot_register_all_stage_from_the_shared_copy(fails_at: int) -> None:
    devices = [RegisteringDevice() for _ in range(3)]
    script = devices[1].script

    def fail_at_first() -> None:
        script.fails_at = fails_at if script.num_registers <= fails_at else None

    script.before_register = fail_at_first
    options = {"registration_piece_bytes": mmap.PAGESIZE}
    for rank, statistics in enumerate(await stream_on(3, CASE, devices=devices, options=options)):  # type: ignore[arg-type]
        assert (statistics.choice.source, statistics.choice.transfer) == ("module", "staged")
        assert statistics.choice.transfer_reason.startswith("rank 1: ")
        assert statistics.registration.registered_bytes == 0, rank
    assert [device.script.registered for device in devices] == [{}] * 3


@pytest.mark.parametrize("make_device", [CpuDevice, RegisteringDevice], ids=["read", "registered"])
async def test_no_descriptor_is_left_when_it_has_closed(make_device: Callable[[], CpuDevice]) -> None:
    """At once, not when the collector comes by; the tensors go on showing the copy, which goes with them."""
    ranks = AgreeingRanks(2)

    async def work(rank: AgreeingRank) -> nn.Module:
        model = CASE.build()
        async with opened(model, rank, {}, make_device()) as (offload, _):
            await offload.run(run_calls, model, CASE.calls)
            await rank.agree("all have seen that it is open", None)
            assert descriptors_held()
        await rank.agree("all have closed", None)
        return model

    gc.collect()
    gc.disable()
    try:
        models = raise_first(await on_ranks(ranks, work))
        assert descriptors_held() == []
        assert len(mappings_held()) == 2
        expected = sha256_of(list(CASE.build().parameters()))
        assert [sha256_of(list(model.parameters())) for model in models] == [expected] * 2
        models.clear()
        gc.collect()
        assert mappings_held() == []
    finally:
        gc.enable()
