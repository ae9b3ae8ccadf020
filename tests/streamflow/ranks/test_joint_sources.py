"""Where ranks that gather have their weights from: checkpoint, store, modules; and what that costs each of the host."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import torch.distributed as dist
from torch import nn

import streamflow
from streamflow import Offload
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.ranks.topology import RankGroups
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.devices import RegisteringDevice
from tests.streamflow.kit import resident_digests, run_calls, save_checkpoint, sha256_of
from tests.streamflow.models import CALLS, Call, Case, mlp_stack
from tests.streamflow.ranks.joint import (
    Member,
    Outcome,
    Seen,
    assert_nothing_left,
    backend_of,
    failed,
    joined,
    options,
)

CASE = Case("mlp", lambda: mlp_stack(6), CALLS)
MIB = 1 << 20

Opening = AbstractAsyncContextManager[tuple[Offload, nn.Module]]


def groups() -> RankGroups:
    return RankGroups(data_parallel=dist.group.WORLD)


def store_options(root: Path) -> dict[str, Any]:
    store = {"root": str(root), "free_space_headroom_bytes": 0, "free_space_headroom_fraction": 0.0}
    return {"store_mode": "preferred", "store": store}


def calls_of(rank: int) -> list[Call]:
    return [(x * (1 + rank / 8) + rank,) for (x,) in CALLS]


@asynccontextmanager
async def from_module(
    folder: Path, device: CpuDevice, given: dict[str, Any]
) -> AsyncIterator[tuple[Offload, nn.Module]]:
    model = CASE.build()
    async with streamflow.open_offload(model, given, ranks=groups(), device=device) as offload:
        yield offload, model


@asynccontextmanager
async def from_files(
    folder: Path, device: CpuDevice, given: dict[str, Any]
) -> AsyncIterator[tuple[Offload, nn.Module]]:
    inputs = LoadInputs(producer_abi="ranks 1")
    opening = streamflow.open_streamed(
        CASE.build, folder, given, load=lambda skeleton: CASE.build(), inputs=inputs, ranks=groups(), device=device
    )
    async with opening as (offload, model):
        yield offload, model


Source = Callable[[Path, CpuDevice, dict[str, Any]], Opening]


@attrs.frozen
class Told:
    """What a rank tells of one opening."""

    outcome: Outcome
    seen: Seen | None = None
    source: str = ""
    store: str | None = None
    store_reason: str | None = None
    registration: str | None = None


async def use(
    rank: Rank, source: Source, folder: Path, changes: Mapping[str, Any], backend: CpuDevice, time: int
) -> Told:
    """Open from ``source``, make this rank's outputs, close."""
    wave = WaveSignature((("Stack", len(CALLS)),))
    try:
        async with source(folder, backend, options(**changes, max_running_requests=1)) as (offload, model):
            member = Member(rank, model, offload, backend)
            await member.meet(f"open {time}")
            outputs = await offload.request(wave=wave).run(run_calls, model, calls_of(rank.rank))
            outcome = Outcome([sha256_of(output) for output in outputs])
            statistics = offload.statistics()
            await member.meet(f"used {time}")
    except Exception as failure:
        return Told(failed(failure))
    assert backend.memory().in_use == 0
    store = statistics.store
    return Told(
        outcome,
        Seen.of(statistics),
        statistics.choice.source,
        store and str(store.outcome),
        store and store.reason,
        statistics.registration.problem,
    )


def used(
    size: int,
    source: Source,
    folder: Callable[[int], Path],
    changes: Callable[[int], Mapping[str, Any]],
    *,
    times: int = 1,
    device: Callable[[int], CpuDevice] = lambda rank: CpuDevice(),
) -> list[list[Told]]:
    """What the ranks tell, by opening."""

    def work(rank: Rank) -> object:
        before = joined(rank)

        async def main() -> list[Told]:
            return [
                await use(rank, source, folder(rank.rank), changes(rank.rank), device(rank.rank), time)
                for time in range(times)
            ]

        told = anyio.run(main, backend=backend_of(rank))
        assert_nothing_left(before)
        return told

    return [list(opening) for opening in zip(*run_ranks(size, work), strict=True)]


def assert_exact(opening: list[Told], transfer: str) -> None:
    """Every rank has gathered, and what it made of its own inputs is exact."""
    for rank, told in enumerate(opening):
        assert told.outcome.value == resident_digests(CASE.build(), calls_of(rank)), told
        assert told.seen is not None
        assert (told.seen.transfer, told.seen.num_walks) == ("gathered", len(CALLS))
        assert f"({transfer}:" in told.seen.reason
        assert told.seen.peak_is_small
        assert told.seen.streamed_bytes > 0
    assert len({tuple(told.outcome.value) for told in opening}) == len(opening)


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_ranks_stream_from_a_checkpoint(transfer: str, tmp_path: Path) -> None:
    save_checkpoint(CASE.build(), tmp_path)
    (opening,) = used(2, from_files, lambda rank: tmp_path, lambda rank: {"transfer": transfer})
    assert_exact(opening, transfer)
    assert [told.source for told in opening] == ["checkpoint"] * 2


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save_checkpoint(CASE.build(), tmp_path / str(rank))
    (opening,) = used(2, from_files, lambda rank: tmp_path / str(rank), lambda rank: {})
    for told in opening:
        assert told.outcome.error == "RanksDisagreeError"
        assert "the files of the weights" in told.outcome.text


@pytest.mark.parametrize("source", [from_files, from_module])
def test_the_first_rank_publishes_and_the_others_find_it(source: Source, tmp_path: Path) -> None:
    save_checkpoint(CASE.build(), tmp_path)
    first, second = used(3, source, lambda rank: tmp_path, lambda rank: store_options(tmp_path / "store"), times=2)
    for opening in (first, second):
        assert_exact(opening, "direct")
        assert [told.source for told in opening] == ["artifact"] * 3
    assert sorted(told.store or "" for told in first) == ["local_hit", "local_hit", "published"]
    assert [told.store for told in second] == ["local_hit"] * 3


@pytest.mark.parametrize("source", [from_files, from_module])
def test_where_the_store_cannot_serve_one_rank_it_serves_none(source: Source, tmp_path: Path) -> None:
    """The last rank has no room for an entry: all stream from what they have without the store."""
    save_checkpoint(CASE.build(), tmp_path)

    def changes(rank: int) -> dict[str, Any]:
        given = store_options(tmp_path / f"store {rank == 1}")
        if rank == 1:
            given["store"]["free_space_headroom_bytes"] = 1 << 60
        return given

    (opening,) = used(2, source, lambda rank: tmp_path, changes)
    assert_exact(opening, "direct")
    assert len({told.source for told in opening}) == 1
    assert opening[0].source in ("checkpoint", "module")
    assert "rank 1" in (opening[0].store_reason or ""), opening[0]


@pytest.mark.parametrize("source", [from_files, from_module])
@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_cannot_register_all_ranks_stage(source: Source, who: int, tmp_path: Path) -> None:
    save_checkpoint(CASE.build(), tmp_path)

    def device(rank: int) -> CpuDevice:
        return RegisteringDevice(refusal="the test wants it so") if rank == who else RegisteringDevice()

    (opening,) = used(2, source, lambda rank: tmp_path, lambda rank: {}, device=device)
    assert_exact(opening, "staged")
    assert "the test wants it so" in (opening[1 - who].registration or "")
    assert f"rank {who}" in (opening[1 - who].registration or "")
