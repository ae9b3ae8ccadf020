"""Communicators over torch.distributed: gloo among processes, in place, and with ranks that end or stand still."""

from __future__ import annotations

import hashlib
import time
from functools import partial

import anyio
import pytest
import torch
import torch.distributed as dist

from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceStreamError
from streamflow.stages.images import memory_image, view_of
from streamflow.stages.layout import ImageLayout, TensorSpec, contiguous_stride, plan_layout
from streamflow.stages.ranks.communicator import TorchCommunicator, new_communicator
from streamflow.stages.ranks.errors import GatherError
from streamflow.stages.ranks.meeting import default_store
from streamflow.stages.testing.blocks import ToyBlocks, in_pieces
from streamflow.stages.testing.gather_trials import open_rank
from streamflow.stages.transfers.gathered import StagingOptions
from tests.ranks import Rank, forked_ranks, run_ranks

CPU = torch.device("cpu")
#: When ranks give up on one that stands still; the others have to notice within two seconds more.
TIMEOUT_S = 1.0


def joined(rank: Rank, *, timeout_s: float = 20.0) -> TorchCommunicator:
    """A communicator of all ranks, which have joined."""
    rank.join()
    communicator = new_communicator(default_store(), "test", rank.rank, rank.size, CPU, timeout_s=timeout_s)
    rank.meet("connected")
    return communicator


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_are_gathered_in_place(size: int) -> None:
    def work(rank: Rank) -> list[list[int]]:
        communicator = joined(rank)
        assert (communicator.rank, communicator.size) == (rank.rank, size)
        found = []
        for slice_bytes in (1, 255, 256, 4096):
            buffer = torch.zeros(size * slice_bytes + 100, dtype=torch.uint8)
            target = buffer[50 : 50 + size * slice_bytes]
            target[rank.rank * slice_bytes :][:slice_bytes] = 1 + rank.rank
            communicator.gather(target, slice_bytes)
            assert target.view(size, slice_bytes).float().std(dim=1, correction=0).max() == 0
            assert int(buffer[:50].sum() + buffer[50 + size * slice_bytes :].sum()) == 0
            found.append(target[::slice_bytes].tolist())
        communicator.close()
        communicator.close()
        return found

    assert run_ranks(size, work) == [[list(range(1, size + 1))] * 4] * size


# Whole blocks

DTYPES = ("float8_e4m3fn", "bfloat16", "float32", "uint8", "float8_e5m2")


def mixed_blocks() -> ToyBlocks:
    """Blocks of unequal sizes (5 to 1, and 1231 to 239), each of tensors of several dtypes."""
    generator = torch.Generator().manual_seed(7)
    images, expected = {}, {}
    for block, width in enumerate((5 * 211, 211, 1231, 239)):
        shapes = [(width, 3), (width,), (3, width), (1,), (width, 2)]
        layout = plan_layout(
            TensorSpec(name, name, shape, contiguous_stride(shape)) for name, shape in zip(DTYPES, shapes, strict=True)
        )
        memory = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8, generator=generator)
        images[block], expected[block] = memory_image(f"block {block}", layout, memory), memory
    return in_pieces(ToyBlocks(images, expected))


def digest_of(layout: ImageLayout, slot: torch.Tensor) -> str:
    """Of all tensors of a block, as they are seen through their own dtypes."""
    digest = hashlib.sha256()
    for view in layout.views:
        tensor = view_of(slot, view)
        assert str(tensor.dtype) == f"torch.{view.dtype}"
        digest.update(bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist()))
    return digest.hexdigest()


@pytest.mark.parametrize("staged", [None, StagingOptions(2, 2048)], ids=["direct", "staged"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_blocks_of_mixed_dtypes_are_exact_on_every_rank(size: int, staged: StagingOptions | None) -> None:
    blocks = mixed_blocks()
    order = [0, 1, 2, 3, 1, 0]

    async def fetch(rank: Rank) -> list[str]:
        async with open_rank(
            CpuDevice(), blocks, joined(rank), window_slots=2, chunk_bytes=4096, staged=staged
        ) as opened:
            seen = await opened.fetch_in_order(blocks, order)
        return [digest_of(blocks.images[block].layout, image) for block, image in seen]

    found = run_ranks(size, lambda rank: anyio.run(partial(fetch, rank), backend=("asyncio", "trio")[rank.rank % 2]))
    assert found == [[digest_of(blocks.images[block].layout, blocks.expected[block]) for block in order]] * size


# Ranks that do not come


def gather_until_it_fails(communicator: TorchCommunicator) -> tuple[str, float]:
    """Gather again and again; returns the error and the seconds from the beginning of the gather that failed."""
    target = torch.zeros(communicator.size * 4096, dtype=torch.uint8)
    while True:
        began = time.monotonic()
        try:
            communicator.gather(target, 4096)
        except GatherError as failure:
            seconds = time.monotonic() - began
            with pytest.raises(GatherError) as again:
                communicator.gather(target, 4096)
            assert again.value is failure
            communicator.abort()
            communicator.close()
            return str(failure), seconds


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_ends_or_stands_still_is_noticed_in_time(size: int, how: str) -> None:
    def work(rank: Rank) -> tuple[str, float]:
        communicator = joined(rank, timeout_s=TIMEOUT_S)
        rank.say("gathering")
        return gather_until_it_fails(communicator)

    with forked_ranks(size, work) as ranks:
        for number in range(size):
            ranks.wait_for("gathering", of=number)
        if how == "killed":
            ranks.kill(size - 1)
        else:
            ranks.stop(size - 1)
        for message, seconds in ranks.answers(of=range(size - 1)):
            assert "close the offload on every rank and open new ones" in message
            assert seconds < TIMEOUT_S + 2


@pytest.mark.parametrize("staged", [None, StagingOptions(2, 2048)], ids=["direct", "staged"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_fetches_fail_in_time_where_a_rank_does_not_come_any_more(how: str, staged: StagingOptions | None) -> None:
    """And the transfer, its device and threads close at once then, with nothing left in use."""
    blocks = mixed_blocks()

    async def fetch_until_it_fails(rank: Rank) -> tuple[str, float, float]:
        device, communicator = CpuDevice(), joined(rank, timeout_s=TIMEOUT_S)
        async with open_rank(device, blocks, communicator, window_slots=2, chunk_bytes=4096, staged=staged) as opened:
            rank.say("fetching")
            while True:
                began = time.monotonic()
                try:
                    await opened.fetch_in_order(blocks, [0, 1, 2, 3])
                except DeviceStreamError as failure:
                    reason, failed = type(failure.cause).__name__, time.monotonic()
                    break
        assert device.memory().in_use == 0
        communicator.close()
        return reason, failed - began, time.monotonic() - failed

    with forked_ranks(3, lambda rank: anyio.run(fetch_until_it_fails, rank)) as ranks:
        for number in range(3):
            ranks.wait_for("fetching", of=number)
        if how == "killed":
            ranks.kill(2)
        else:
            ranks.stop(2)
        for reason, seconds_to_fail, seconds_to_close in ranks.answers(of=(0, 1)):
            assert reason == "GatherError"
            assert seconds_to_fail < TIMEOUT_S + 2
            assert seconds_to_close < 2


def test_the_error_is_the_one_that_names_the_rank() -> None:
    class NamedError(Exception):
        pass

    def work(rank: Rank) -> tuple[str, str]:
        communicator = joined(rank, timeout_s=TIMEOUT_S)
        if rank.rank == 1:
            return "", ""
        asked: list[Exception] = []

        def blame(failure: Exception) -> Exception:
            asked.append(failure)
            return NamedError("rank 1 ended")

        communicator = TorchCommunicator(communicator._backend, 0, 2, blame)
        with pytest.raises(NamedError, match="rank 1 ended") as caught:
            communicator.gather(torch.zeros(512, dtype=torch.uint8), 256)
        assert [type(failure) for failure in asked] == [GatherError]
        return str(asked[0]), type(caught.value.__cause__).__name__

    reason, cause = run_ranks(2, work)[0]
    assert reason.startswith("rank 0 of 2 could not gather a block from the others: ")
    assert cause in reason


def test_nothing_is_gathered_after_giving_up() -> None:
    def work(rank: Rank) -> str:
        communicator = joined(rank)
        communicator.abort()
        communicator.abort()
        with pytest.raises(GatherError, match="it was given up here before") as caught:
            communicator.gather(torch.zeros(2, dtype=torch.uint8), 1)
        communicator.close()
        communicator.abort()
        return str(caught.value)

    assert len(run_ranks(2, work)) == 2


def test_ranks_that_cannot_meet_are_told() -> None:
    def work(rank: Rank) -> str:
        rank.join(timeout_s=TIMEOUT_S)
        if rank.rank == 1:
            return ""
        with pytest.raises(GatherError, match="the ranks do not meet") as caught:
            new_communicator(default_store(), "test", 0, 2, CPU, timeout_s=TIMEOUT_S)
        return str(caught.value)

    assert run_ranks(2, work)[0]


def test_ranks_that_have_made_other_groups_meet_and_meet_again() -> None:
    def work(rank: Rank) -> list[bool]:
        rank.join()
        if rank.rank == 0:
            dist.new_group([0], backend="gloo", use_local_synchronization=True)
        return [_gathers_all(rank, f"meeting {number}") for number in range(3)]

    assert run_ranks(2, work) == [[True] * 3] * 2


def _gathers_all(rank: Rank, name: str) -> bool:
    communicator = new_communicator(default_store(), name, rank.rank, rank.size, CPU, timeout_s=20)
    target = torch.zeros(rank.size, dtype=torch.uint8)
    target[rank.rank] = rank.rank + 1
    communicator.gather(target, 1)
    communicator.close()
    return target.tolist() == list(range(1, rank.size + 1))


# What versions of torch call things


class Backend:
    """A backend that has some methods only, which it counts."""

    def __init__(self, *names: str) -> None:
        self.called: list[str] = []
        for name in names:
            setattr(self, name, partial(self.called.append, name))


@pytest.mark.parametrize("name", ["abort", "_abort"])
def test_a_backend_is_aborted_once_by_the_name_that_it_has(name: str) -> None:
    backend = Backend(name)
    communicator = TorchCommunicator(backend, 0, 2)
    communicator.abort()
    communicator.abort()
    communicator.close()
    assert backend.called == [name]


@pytest.mark.parametrize("name", ["shutdown", "_shutdown"])
def test_a_backend_is_shut_down_once_by_the_name_that_it_has(name: str) -> None:
    backend = Backend(name)
    communicator = TorchCommunicator(backend, 0, 2)
    communicator.close()
    communicator.close()
    communicator.abort()
    assert backend.called == [name]


def test_closing_ends_where_the_causes_of_the_failure_are_a_circle() -> None:
    class Broken:
        def _allgather_base(self, *args: object) -> None:
            raise RuntimeError("closed by peer")

    communicator = TorchCommunicator(Broken(), 0, 2)
    with pytest.raises(GatherError) as caught:
        communicator.gather(torch.zeros(2, dtype=torch.uint8), 1)
    assert caught.value.__cause__ is not None
    caught.value.__cause__.__cause__ = caught.value
    communicator.close()
