"""``streamflow bench link``: how fast host memory reaches the device, by the kind of memory, and how fast it is packed.

All readings are of one run, on one device, from one file in the page cache; ratios are to page-locked memory in large
copies, which nothing exceeds.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
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
from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.registration.plan import Extent
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.rates import copy_rate, pack_rate
from streamflow.tools.terminal import plain_table, print_json, result_console
from streamflow.weights.checkpoint_file import CheckpointFile, open_checkpoint_file
from streamflow.weights.pieces import FilePiece
from streamflow.weights.registering import RegisteredFiles, RegistrationReport

#: What small copies are measured with.
SMALL_COPY_BYTES = 1 << 20
#: How long packing is measured, for each number of threads.
PACK_SECONDS = 1.0


@attrs.frozen
class LinkReading:
    """A rate, and its ratio to the best there is. ``what`` is ``copy`` (to the device) or ``pack`` (to host memory)."""

    what: str
    source: str
    bytes_per_s: float
    ratio: float


async def measure_link(config: streamflow.OffloadConfig, nbytes: int, folder: Path) -> dict[str, Any]:
    """All readings, from a file of ``nbytes`` in ``folder``."""
    async with open_threads() as crew:
        device = make_device(config)
        await device.open(crew)
        try:
            file = await crew.call(partial(_make_file, folder, nbytes), name="file")
            try:
                readings, registration = await _measure(config, device, file, crew)
            finally:
                await crew.call_through(file.close)
        finally:
            device.close()
    best = readings[0][2]
    return {
        "benchmark": "link",
        "environment": environment(device.torch_device),
        "nbytes": nbytes,
        "readings": [attrs.asdict(LinkReading(what, source, rate, rate / best)) for what, source, rate in readings],
        "registration": attrs.asdict(registration),
    }


def _make_file(folder: Path, nbytes: int) -> CheckpointFile:
    path = folder / "link.safetensors"
    save_file({"weights": torch.arange(nbytes // 8, dtype=torch.int64)}, path)
    return open_checkpoint_file(path)


async def _measure(
    config: streamflow.OffloadConfig, device: Device, file: CheckpointFile, crew: ThreadCrew
) -> tuple[list[tuple[str, str, float]], RegistrationReport]:
    (entry,) = file.header.entries.values()
    stream = device.open_copy_stream("link")
    copied = await crew.call(lambda: list(_private_rates(device, stream, entry.nbytes)), name="link")
    async with _registered(config, file, device, crew) as (report, run):
        if run is not None:
            copied.append(("registered file", await crew.call(partial(copy_rate, device, stream, run, run.numel()))))
            del run
    packed = [
        (f"file, {num_threads} threads", await _pack_rate(config, file, num_threads, crew))
        for num_threads in _thread_counts(config)
    ]
    readings = [("copy", *reading) for reading in copied] + [("pack", *reading) for reading in packed]
    return readings, report


def _private_rates(device: Device, stream: Stream, nbytes: int) -> Iterator[tuple[str, float]]:
    memory = allocate_host(nbytes)
    memory.fill_(1)
    lock = PageLock(device.registrar, memory)
    try:
        yield "page-locked", copy_rate(device, stream, memory, nbytes)
        yield "page-locked, 1 MiB copies", copy_rate(device, stream, memory, SMALL_COPY_BYTES)
    finally:
        lock.release()
    yield "pageable", copy_rate(device, stream, memory, nbytes, num_copies=3)


@asynccontextmanager
async def _registered(
    config: streamflow.OffloadConfig, file: CheckpointFile, device: Device, crew: ThreadCrew
) -> AsyncIterator[tuple[RegistrationReport, torch.Tensor | None]]:
    """The file registered, in its largest run; None, and why, where it cannot be."""
    (entry,) = file.header.entries.values()
    mapping = await crew.call(file.map, name="mapping")
    registered = RegisteredFiles(config, owner=file)
    extent = Extent(0, entry.offset_bytes, entry.nbytes)
    try:
        report = await registered.open([mapping], [extent], device, crew)
        yield report, max(registered.runs(extent), key=torch.Tensor.numel) if report.problem is None else None
    finally:
        await crew.call_through(partial(registered.close, retry=file.close))


def _thread_counts(config: streamflow.OffloadConfig) -> list[int]:
    counts = {1, 2, 4, 8, 16, config.effective_packing_threads}
    return sorted(count for count in counts if count <= config.effective_packing_threads)


async def _pack_rate(
    config: streamflow.OffloadConfig, file: CheckpointFile, num_threads: int, crew: ThreadCrew
) -> float:
    (entry,) = file.header.entries.values()
    piece = FilePiece(0, entry.nbytes, file, entry.offset_bytes)
    return await pack_rate([piece], crew, num_threads, config.staging_chunk_bytes, PACK_SECONDS)


@click.command("link")
@click.option("--device", default=None, help="cuda, cuda:N or cpu; default: cuda where there is one.")
@click.option("--size-mib", type=click.IntRange(16), default=None, help="Size of the copies.  [default: by the device]")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where the file is made.  [default: of temporary files]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the readings as one JSON object.")
def link(*, device: str | None, size_mib: int | None, folder: Path | None, as_json: bool) -> None:
    """Copies to the device from page-locked, registered and pageable memory, and packing by threads: rates, ratios."""
    config = streamflow.OffloadConfig(device=device)
    if size_mib is None:
        size_mib = 1024 if config.torch_device().type == "cuda" else 64
    with tempfile.TemporaryDirectory(prefix="streamflow-bench-", dir=folder) as made:
        report = anyio.run(measure_link, config, size_mib << 20, Path(made))
    if as_json:
        print_json(report)
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    table = plain_table("", "from", "ratio", "rate", num_left=2, title=f"host to {report['environment']['device']}")
    for reading in report["readings"]:
        rate = f"{reading['bytes_per_s'] / 1e9:.1f} GB/s"
        table.add_row(reading["what"], reading["source"], f"{reading['ratio']:.3f}", rate)
    console = result_console()
    console.print(table)
    registration = report["registration"]
    if registration["problem"] is not None:
        console.print(f"files are not registered: {registration['problem']}")
    else:
        console.print(f"registered {registration['registered_bytes']:,} bytes in {registration['seconds']:.3f} s")
