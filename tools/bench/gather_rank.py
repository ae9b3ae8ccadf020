"""One rank of ``streamflow bench gather``: under torchrun, or a process that the benchmark started.

Every step is done by all ranks at once, under a timeout; its reading is the slowest rank's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import attrs
import torch
import torch.distributed as dist

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.errors import StreamflowError
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import BlockImage, memory_image
from streamflow.stages.layout import TensorSpec, plan_layout
from streamflow.stages.ranks.communicator import TorchCommunicator, new_communicator
from streamflow.stages.ranks.meeting import default_store
from streamflow.stages.ranks.slices import plan_gather
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.transfers.direct import DirectTransfer
from streamflow.stages.transfers.gathered import open_gathered
from streamflow.tools.bench.children import answer
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.rank_processes import RankPlace, join_ranks

#: Gathers of the smallest size, for their latency.
NUM_SMALL_GATHERS = 32
SMALL_SLICE_BYTES = 256


@attrs.frozen
class GatherQuestion:
    """What the ranks are to measure: images of ``nbytes``, in chunks of each of these sizes, ``num_fetches`` each.

    ``step_limit_s`` is for each reading.
    """

    device: str
    nbytes: int
    chunk_bytes: Sequence[int]
    num_fetches: int
    step_limit_s: float


@attrs.frozen
class ChunkReading:
    """Rates with one chunk size. ``link`` is of a rank's slices, the others are of the whole image, from all ranks.

    ``ratio_to_whole``: of both overlapped, to what each rank alone copies whole images with.
    """

    chunk_bytes: int
    slice_bytes: int
    link_bytes_per_s: float
    gather_bytes_per_s: float
    both_bytes_per_s: float
    ratio_to_whole: float
    equal: bool


@attrs.frozen
class _Bench:
    """What a rank measures with."""

    question: GatherQuestion
    device: Device
    crew: ThreadCrew
    communicator: TorchCommunicator
    copies: Stream
    communication: Stream
    image: BlockImage
    memory: torch.Tensor
    slots: Sequence[torch.Tensor]

    async def all_ranks(self, work: Callable[[], float]) -> list[float]:
        """What ``work`` gives on each rank; all begin it together.

        :raises TimeoutError: if that took too long; the communicator is aborted then.
        """
        with anyio.fail_after(self.question.step_limit_s):
            return await self.crew.call(lambda: _together(work), on_cancel=self.communicator.abort, name="step")

    async def rate(self, nbytes: int, queue: Callable[[int], Event]) -> float:
        """Bytes per second of the slowest rank, where ``queue(k)`` queues ``nbytes`` for the k-th time."""
        num = self.question.num_fetches

        def seconds() -> float:
            started = time.perf_counter()
            events = [queue(index) for index in range(num)]
            for event in events:
                event.wait()
            return time.perf_counter() - started

        await self.all_ranks(seconds)  # what happens the first time does not count
        return nbytes * num / max(await self.all_ranks(seconds))


def _together(work: Callable[[], float]) -> list[float]:
    dist.barrier()
    found = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, work())
    return found


async def measure_rank(question: GatherQuestion, place: RankPlace) -> dict[str, Any]:
    """All readings, equal on all ranks; with a ``problem`` if the ranks could not go on."""
    report: dict[str, Any] = {
        "benchmark": "gather",
        "ranks": place.size,
        "nbytes": question.nbytes,
        "whole_bytes_per_s": None,
        "gather_latency_s": None,
        "readings": [],
        "problem": None,
    }
    try:
        async with _open_bench(question, place) as bench:
            report["environment"] = environment(bench.device.torch_device)
            await _measure(bench, report)
    except TimeoutError:
        report["problem"] = f"a step was not done after {question.step_limit_s:g} s"
    except (StreamflowError, RuntimeError) as failure:  # torch.distributed's errors are of the latter kind
        report["problem"] = str(failure)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return report


async def _measure(bench: _Bench, report: dict[str, Any]) -> None:
    whole = DirectTransfer(bench.copies, reads_any_memory=bench.device.is_host)
    report["whole_bytes_per_s"] = whole_rate = await bench.rate(bench.image.nbytes, _fetches(bench, whole))
    await bench.all_ranks(partial(_small_gather_s, bench))  # the first gather connects the ranks
    report["gather_latency_s"] = max(await bench.all_ranks(partial(_small_gather_s, bench)))
    for chunk_bytes in bench.question.chunk_bytes:
        report["readings"].append(attrs.asdict(await _chunk_reading(bench, chunk_bytes, whole_rate)))


async def _chunk_reading(bench: _Bench, chunk_bytes: int, whole_rate: float) -> ChunkReading:
    communicator, nbytes = bench.communicator, bench.image.nbytes
    plan = plan_gather(nbytes, communicator.size, chunk_bytes)
    runs = plan.runs_of(communicator.rank)

    def copy_slices(index: int) -> Event:
        for run in runs:
            target = bench.slots[index % 2][run.offset : run.end]
            bench.copies.copy(target, bench.memory[run.offset : run.end])
        return bench.copies.record()

    def gather_chunks(index: int) -> Event:
        for chunk in plan.chunks:
            target = bench.slots[index % 2][chunk.image_offset :][: communicator.size * chunk.slice_bytes]
            bench.communication.submit(partial(communicator.gather, target, chunk.slice_bytes))
        return bench.communication.record()

    link_rate = await bench.rate(plan.copied_bytes, copy_slices)
    gather_rate = await bench.rate(nbytes, gather_chunks)
    with anyio.fail_after(bench.question.step_limit_s):
        transfer = await open_gathered(
            bench.device, bench.copies, bench.crew, [bench.image], communicator, chunk_bytes=chunk_bytes, staged=None
        )
    for slot in bench.slots:
        slot.zero_()
    both_rate = await bench.rate(nbytes, _fetches(bench, transfer))
    equal = await bench.all_ranks(lambda: all(torch.equal(slot.cpu(), bench.memory) for slot in bench.slots))
    transfer.close()
    slice_bytes = plan.chunks[0].slice_bytes if plan.chunks else 0
    ratio = both_rate / whole_rate
    return ChunkReading(chunk_bytes, slice_bytes, link_rate, gather_rate, both_rate, ratio, all(equal))


def _fetches(bench: _Bench, transfer: Transfer) -> Callable[[int], Event]:
    """Fetches into the two slots in turn, each once the one before has filled its slot."""
    busy: dict[int, Event] = {}

    def fetch(index: int) -> Event:
        after = [busy[index % 2]] if index % 2 in busy else []
        event = transfer.fetch(bench.image, bench.slots[index % 2], after).event
        if event is None:
            raise TypeError(f"the {transfer.name} transfer does not queue its copies at once")
        busy[index % 2] = event
        return event

    return fetch


def _small_gather_s(bench: _Bench) -> float:
    target = bench.slots[0][: bench.communicator.size * SMALL_SLICE_BYTES]
    started = time.perf_counter()
    for _ in range(NUM_SMALL_GATHERS):
        bench.communication.submit(partial(bench.communicator.gather, target, SMALL_SLICE_BYTES))
    bench.communication.record().wait()
    return (time.perf_counter() - started) / NUM_SMALL_GATHERS


@asynccontextmanager
async def _open_bench(question: GatherQuestion, place: RankPlace) -> AsyncIterator[_Bench]:
    device: Device = CpuDevice()
    if question.device == "cuda":
        torch.cuda.set_device(place.local_rank)
        device = CudaDevice(torch.device("cuda", place.local_rank))
    async with open_threads() as crew:
        await device.open(crew)
        communicator = await crew.call(partial(_join, question, place, device.torch_device), name="meeting")
        memory = allocate_host(question.nbytes)
        memory.view(torch.int64).copy_(torch.arange(question.nbytes // 8))
        lock = await crew.call(partial(PageLock, device.registrar, memory), name="page-locking")
        slots = [device.allocate(question.nbytes) for _ in range(2)]
        layout = plan_layout([TensorSpec("weights", "uint8", (question.nbytes,), (1,))])
        try:
            yield _Bench(
                question,
                device,
                crew,
                communicator,
                device.open_copy_stream("copy"),
                device.open_communication_stream("gather alone"),
                memory_image("image", layout, memory, page_locked=True),
                memory,
                slots,
            )
        finally:
            for slot in slots:
                device.free(slot)
            await crew.call_through(lock.release)
            await crew.call_through(communicator.close)
            device.close()


def _join(question: GatherQuestion, place: RankPlace, device: torch.device) -> TorchCommunicator:
    # longer than a step may take: what ends a step is its own limit
    timeout_s = 2 * question.step_limit_s
    join_ranks(place, timeout_s)
    return new_communicator(default_store(), "bench gather", place.rank, place.size, device, timeout_s=timeout_s)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    answer(anyio.run(measure_rank, GatherQuestion(**asked["question"]), RankPlace(**asked["place"])))
