"""The rates that bound a streamed step: of the host link, and of packing."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import anyio
import torch
from torch import nn

from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import MemoryPiece, Piece
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.threads import ThreadCrew
from streamflow.tools.bench.clock import Mark, intervals, mark

#: Size of one copy; larger ones are not faster.
COPY_BYTES = 1 << 30


def link_rate(device: Device, stream: Stream, nbytes: int = COPY_BYTES, num_copies: int = 8) -> float:
    """Bytes per second of copies on ``stream`` from page-locked memory; the median of ``num_copies``. Blocks."""
    source = allocate_host(nbytes)
    lock = PageLock(device.registrar, source)
    try:
        return copy_rate(device, stream, source, nbytes, num_copies)
    finally:
        lock.release()


def copy_rate(device: Device, stream: Stream, source: torch.Tensor, piece_bytes: int, num_copies: int = 8) -> float:
    """Bytes per second of copies of ``source`` to the device, in pieces of this size; the median of ``num_copies``.

    Blocks. Nothing else may use ``stream``.
    """
    target = device.allocate(source.numel())
    try:
        marks: list[Mark] = []
        for _ in range(num_copies + 2):
            for to, what in zip(target.split(piece_bytes), source.split(piece_bytes), strict=True):
                stream.copy(to, what)
            stream.submit(lambda: marks.append(mark(device.torch_device)))
        stream.record().wait()
        return source.numel() / statistics.median(intervals(marks[1:]))
    finally:
        device.free(target)


def pieces_of(model: nn.Module) -> list[MemoryPiece]:
    """The model's parameters, each a piece."""
    return [MemoryPiece(0, _flat_bytes(parameter)) for parameter in model.parameters()]


async def pack_rate(
    pieces: Sequence[Piece], crew: ThreadCrew, num_threads: int, chunk_bytes: int, seconds: float
) -> float:
    """Bytes per second that ``num_threads`` threads read from ``pieces`` into buffers of ``chunk_bytes``."""
    chunks = [
        (piece, start, min(chunk_bytes, piece.nbytes - start))
        for piece in pieces
        for start in range(0, piece.nbytes, chunk_bytes)
    ]
    order = itertools.cycle(chunks)
    packed: list[int] = []
    ends_at = time.perf_counter() + seconds

    def pack() -> None:
        buffer = allocate_host(chunk_bytes)
        count = 0
        while time.perf_counter() < ends_at:
            piece, start, nbytes = next(order)
            piece.read_into(buffer.data_ptr(), start, nbytes)
            count += nbytes
        packed.append(count)

    started = time.perf_counter()
    async with anyio.create_task_group() as packers:
        for _ in range(num_threads):
            packers.start_soon(crew.call, pack)
    return sum(packed) / (time.perf_counter() - started)


def _flat_bytes(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data.reshape(-1).view(torch.uint8)
