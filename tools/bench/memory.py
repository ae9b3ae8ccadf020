"""``streamflow bench memory``: what several processes that stream one stored model take together."""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import attrs
import click
from anyio.streams.buffered import BufferedByteReceiveStream

from streamflow.tools.bench.pinned_pages import quiet_pinned_pages
from streamflow.tools.bench.stored_model import is_host, num_blocks_of, save_model
from streamflow.tools.terminal import fact_table, format_bytes, print_json, result_console

#: Bytes that all processes together may take beyond the artifact, over 1.05 times its size.
SLACK_BYTES = 64_000_000
WORKER = "streamflow.tools.bench.memory_worker"


@attrs.frozen
class MemoryReading:
    """Bytes. ``shared_bytes`` is the sum of the processes' PSS, less what each had before opening, and less what it has
    for itself on the host (window, staging, fixed bytes); ``limit_bytes`` is 1.05 times the artifact and 64 MB.
    ``private_bytes`` are dirty and anonymous pages of the artifact's mappings, ``left_bytes`` what is mapped of it
    after closing. ``pinned_pages``: of the whole machine before opening, while open and after closing; None: not looked
    at, because the device is the host, or not counted by this kernel.
    """

    device: str
    num_processes: int
    artifact_bytes: int
    shared_bytes: int
    limit_bytes: int
    private_bytes: int
    mapped_bytes: int
    left_bytes: int
    registered_bytes: int
    pinned_pages: tuple[int, int, int] | None
    outcomes: tuple[str, ...]
    transfers: tuple[str, ...]
    outputs_equal: bool

    @property
    def is_met(self) -> bool:
        """Whether what is promised holds."""
        is_shared = self.shared_bytes <= self.limit_bytes and self.private_bytes == 0
        return is_shared and self.outputs_equal and self.left_bytes == 0 and self._is_unpinned

    @property
    def _is_unpinned(self) -> bool:
        if self.pinned_pages is None:
            return self.registered_bytes == 0
        before, opened, after = self.pinned_pages
        return after == before and opened - before >= self.registered_bytes // mmap.PAGESIZE


class _Replica:
    """A running worker, spoken to by lines."""

    def __init__(self, process: anyio.abc.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker has no pipes")  # pragma: no cover - open_process makes them
        self._stdin = process.stdin
        self._stdout = BufferedByteReceiveStream(process.stdout)

    async def go_on(self) -> None:
        await self._stdin.send(b"\n")

    async def hear(self) -> dict[str, Any]:
        line = await self._stdout.receive_until(b"\n", 1 << 20)
        told: dict[str, Any] = json.loads(line)
        return told


async def measure_memory(folder: Path, nbytes: int, num_processes: int, device: str = "cpu") -> MemoryReading:
    """Make a model and its checkpoint in ``folder``, and stream it to ``device`` in ``num_processes`` at once."""
    num_blocks = num_blocks_of(nbytes)
    await anyio.to_thread.run_sync(save_model, folder / "checkpoint", num_blocks)
    command = [sys.executable, "-m", WORKER, str(folder / "checkpoint"), str(folder / "store"), str(num_blocks), device]
    pinned: list[int | None] = []
    async with AsyncExitStack() as stack:
        replicas = []
        for _ in range(num_processes):
            process = await anyio.open_process(command, stderr=None)
            replicas.append(_Replica(await stack.enter_async_context(process)))
        await _hear_all(replicas)
        pinned.append(await _pinned_pages(device))
        opened = await _each(replicas)
        pinned.append(await _pinned_pages(device))
        streamed = await _each(replicas)
        closed = await _each(replicas)
        pinned.append(await _pinned_pages(device))
        await _tell_all(replicas)
    entry_files = [path.stat().st_size for path in (folder / "store" / "entries").glob("*/*/*.safetensors")]
    return _reading(device, opened, streamed, closed, pinned, sum(entry_files))


async def _pinned_pages(device: str) -> int | None:
    return None if is_host(device) else await anyio.to_thread.run_sync(quiet_pinned_pages)


async def _tell_all(replicas: Sequence[_Replica]) -> None:
    for replica in replicas:
        await replica.go_on()


async def _hear_all(replicas: Sequence[_Replica]) -> list[dict[str, Any]]:
    return [await replica.hear() for replica in replicas]


async def _each(replicas: Sequence[_Replica]) -> list[dict[str, Any]]:
    await _tell_all(replicas)
    return await _hear_all(replicas)


def _reading(
    device: str,
    opened: Sequence[dict[str, Any]],
    streamed: Sequence[dict[str, Any]],
    closed: Sequence[dict[str, Any]],
    pinned: Sequence[int | None],
    artifact_bytes: int,
) -> MemoryReading:
    grown = sum(told["pss"] - told["baseline"] for told in streamed) - sum(told["own_bytes"] for told in opened)
    kinds = [told["mapping"] for told in streamed]
    before, during, after = pinned
    counted = None if before is None or during is None or after is None else (before, during, after)
    return MemoryReading(
        device=device,
        num_processes=len(opened),
        artifact_bytes=artifact_bytes,
        shared_bytes=max(0, grown),
        limit_bytes=int(1.05 * artifact_bytes) + SLACK_BYTES,
        private_bytes=sum(kind.get("Private_Dirty", 0) + kind.get("Anonymous", 0) for kind in kinds),
        mapped_bytes=sum(kind.get("Rss", 0) for kind in kinds),
        left_bytes=sum(told["left"].get("Size", 0) for told in closed),
        registered_bytes=sum(told["registered_bytes"] for told in opened),
        pinned_pages=counted,
        outcomes=tuple(str(told["outcome"]) for told in opened),
        transfers=tuple(told["transfer"] for told in opened),
        outputs_equal=len({told["digest"] for told in opened}) == 1,
    )


@click.command("memory")
@click.option("--size-mb", type=click.IntRange(min=32), default=512, show_default=True, help="Size of the model.")
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True, help="Replicas at once.")
@click.option("--device", default="cpu", show_default=True, help="cuda, cuda:N or cpu; all processes share it.")
@click.option("--json", "as_json", is_flag=True, help="Print the reading as one JSON object.")
def memory(*, size_mb: int, processes: int, device: str, as_json: bool) -> None:
    """Host memory of several processes that stream one model from the store, against the size of its entry."""
    with tempfile.TemporaryDirectory(prefix="streamflow-bench-") as folder:
        reading = anyio.run(measure_memory, Path(folder), size_mb * 1_000_000, processes, device)
    if as_json:
        print_json({"benchmark": "memory", **attrs.asdict(reading), "is_met": reading.is_met})
        return
    table = fact_table()
    table.add_row("processes", f"{reading.num_processes} on {reading.device} ({', '.join(reading.outcomes)})")
    table.add_row("entry", format_bytes(reading.artifact_bytes))
    table.add_row(
        "together, beyond their own", f"{format_bytes(reading.shared_bytes)} of {format_bytes(reading.limit_bytes)}"
    )
    table.add_row("private pages of the entry", format_bytes(reading.private_bytes))
    if reading.pinned_pages is not None:
        table.add_row("pinned pages", "before {:,}, open {:,}, closed {:,}".format(*reading.pinned_pages))
    table.add_row("outputs", "equal" if reading.outputs_equal else "DIFFERENT")
    result_console().print(table)
