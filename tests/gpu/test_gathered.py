"""The gathered transfer over NCCL: one rank alone gathers from itself, in place, on the communication stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import memory_image
from streamflow.stages.ranks.communicator import TorchCommunicator, new_communicator
from streamflow.stages.ranks.errors import GatherError
from streamflow.stages.ranks.meeting import default_store
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.testing.blocks import ToyBlocks, toy_blocks
from streamflow.stages.testing.gather_trials import open_rank
from streamflow.stages.transfers.gathered import StagingOptions

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

ORDER = [0, 1, 2, 1, 0, 2, 2]


@pytest.fixture
def communicator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchCommunicator]:
    """Of NCCL, over this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    made = new_communicator(default_store(), "test", 0, 1, CudaDevice().torch_device, timeout_s=60)
    yield made
    made.close()
    dist.destroy_process_group()


@pytest.fixture
def blocks() -> Iterator[ToyBlocks]:
    """Three blocks of unequal sizes, in page-locked memory."""
    toys = toy_blocks([[5 << 20, 100], [1 << 20], [3, 700]])
    registrar = CudaDevice().registrar
    images, locks = {}, []
    for block, image in toys.images.items():
        memory = allocate_host(image.nbytes)
        memory.copy_(toys.expected[block])
        locks.append(PageLock(registrar, memory))
        images[block] = memory_image(image.name, image.layout, memory, page_locked=True)
    yield ToyBlocks(images, toys.expected)
    for lock in locks:
        lock.release()


@pytest.mark.parametrize("staged", [None, StagingOptions(2, 1 << 18)], ids=["direct", "staged"])
async def test_blocks_are_exact(
    communicator: TorchCommunicator, blocks: ToyBlocks, staged: StagingOptions | None
) -> None:
    async with open_rank(
        CudaDevice(), blocks, communicator, window_slots=2, chunk_bytes=1 << 20, staged=staged
    ) as rank:
        seen = await rank.fetch_in_order(blocks, ORDER)
    assert [block for block, _ in seen] == ORDER
    assert all(blocks.is_exact(block, image) for block, image in seen)


async def test_nothing_is_gathered_after_giving_up(communicator: TorchCommunicator, blocks: ToyBlocks) -> None:
    async with open_rank(CudaDevice(), blocks, communicator, window_slots=2, chunk_bytes=1 << 20) as rank:
        assert len(await rank.fetch_in_order(blocks, ORDER)) == len(ORDER)
        communicator.abort()
        communicator.abort()
        for _ in range(2):
            with pytest.raises(GatherError, match="it was given up here before"):
                rank.transfer.fetch(blocks.images[0], rank.window[0].buffer, ())
        assert torch.cuda.current_stream().query()
