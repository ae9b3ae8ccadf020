"""``streamflow bench chunk``: what staging a chunk takes of the interpreter's time, beside moving its bytes.

A packing thread has just moved megabytes when it goes on with its next chunk: the processor's caches hold nothing of
the interpreter. So chunks of one page are staged, with warm caches, and with caches that were emptied before each.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import click
import torch
from safetensors.torch import save_file

import streamflow
from streamflow.hardware import make_device
from streamflow.stages.devices.base import Device, Located, Stream
from streamflow.stages.devices.cpu import CpuComputeStream
from streamflow.stages.images import BlockImage
from streamflow.stages.layout import TensorSpec, plan_layout
from streamflow.stages.testing.pieces import WrappedPiece
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.stages.transfers.staged import open_staged
from streamflow.tools.bench.environment import environment
from streamflow.tools.terminal import fact_table, print_json, result_console
from streamflow.weights.checkpoint_file import CheckpointFile, open_checkpoint_file
from streamflow.weights.pieces import FilePiece

CHUNK_BYTES = 4096
#: What is written to empty the caches.
CACHE_BYTES = 256 << 20


@attrs.frozen
class ChunkCost:
    """Microseconds for each chunk, medians. ``is_copied``: whether the device's own calls are in them."""

    num_chunks: int
    warm_us: float
    cold_us: float
    is_copied: bool


class _DeafStream(CpuComputeStream):
    """A stream that copies nothing: on a host device, a copy is not a call that queues."""

    def copy_part(self, target: Located, start: int, source: Located, nbytes: int) -> None:
        pass


@attrs.define(eq=False)
class _ColdPiece(WrappedPiece):
    """A piece whose reads leave the caches empty of all else, if there is something to write for that.

    ``cost_s``: the time from one read's end to the next one's, but for that writing.
    """

    waste: bytearray
    cost_s: list[float] = attrs.field(factory=list)
    _ended_at: float | None = None

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        self.inner.read_into(address, start, nbytes)
        if self._ended_at is not None:
            self.cost_s.append(time.perf_counter() - self._ended_at)
        if self.waste:
            ctypes.memset((ctypes.c_char * len(self.waste)).from_buffer(self.waste), 1, len(self.waste))
        self._ended_at = time.perf_counter()


async def measure_chunk_cost(config: streamflow.OffloadConfig, num_chunks: int, cache_bytes: int) -> ChunkCost:
    """Both readings on the configured device."""
    device = make_device(config)
    async with open_threads() as crew:
        await device.open(crew)
        with tempfile.TemporaryDirectory(prefix="streamflow-bench-") as folder:
            file = await crew.call(partial(_make_file, Path(folder), num_chunks * CHUNK_BYTES), name="file")
            try:
                warm, cold = [await _median_us(device, crew, file, bytearray(n)) for n in (0, cache_bytes)]
            finally:
                await crew.call_through(file.close)
        device.close()
    return ChunkCost(num_chunks, warm, cold, is_copied=not device.is_host)


def _make_file(folder: Path, nbytes: int) -> CheckpointFile:
    save_file({"weights": torch.zeros(nbytes, dtype=torch.uint8)}, folder / "chunks.safetensors")
    return open_checkpoint_file(folder / "chunks.safetensors")


async def _median_us(device: Device, crew: ThreadCrew, file: CheckpointFile, waste: bytearray) -> float:
    entry = file.header.entries["weights"]
    layout = plan_layout([TensorSpec("weights", "uint8", entry.shape, (1,))])
    piece = _ColdPiece(FilePiece(0, entry.nbytes, file, entry.offset_bytes), waste)
    image = BlockImage("weights", layout, (piece,))
    stream: Stream = _DeafStream("copy", None) if device.is_host else device.open_copy_stream("copy")
    slot = device.allocate(image.nbytes)
    transfer = await open_staged(device, stream, crew, [image], num_threads=1, chunk_bytes=CHUNK_BYTES)
    try:
        event = await transfer.fetch(image, slot, ()).issued()
        await crew.call(event.wait, name="copies")
    finally:
        transfer.close()
        device.free(slot)
    return statistics.median(piece.cost_s) * 1e6


@click.command("chunk")
@click.option("--chunks", type=click.IntRange(2), default=200, show_default=True, help="Chunks of each reading.")
@click.option("--device", default=None, help="cuda, cuda:N or cpu; default: cuda where there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print the reading as one JSON object.")
def chunk(*, chunks: int, device: str | None, as_json: bool) -> None:
    """Interpreter time that the staged transfer takes for each chunk, with warm and with cold caches."""
    config = streamflow.OffloadConfig(device=device)
    cost = anyio.run(measure_chunk_cost, config, chunks, CACHE_BYTES)
    if as_json:
        reading: dict[str, Any] = attrs.asdict(cost)
        print_json({"benchmark": "chunk", "environment": environment(config.torch_device()), "reading": reading})
        return
    table = fact_table()
    table.add_row("a chunk, caches warm", f"{cost.warm_us:.0f} us")
    table.add_row("a chunk, caches cold", f"{cost.cold_us:.0f} us")
    table.add_row("the device's calls", "counted" if cost.is_copied else "not counted: this device is the host")
    result_console().print(table)
