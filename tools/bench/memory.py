"""``streamflow bench memory``: what several processes that stream one stored model take together."""

from __future__ import annotations

import json
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

from streamflow.tools.bench.stored_model import num_blocks_of, save_model
from streamflow.tools.terminal import fact_table, format_bytes, print_json, result_console

#: Bytes that all processes together may take beyond the artifact, over 1.05 times its size.
SLACK_BYTES = 64_000_000
WORKER = "streamflow.tools.bench.memory_worker"


@attrs.frozen
class MemoryReading:
    """Bytes. ``shared_bytes`` is the sum of the processes' PSS, less what each had before opening, and less its window,
    staging and fixed bytes; ``limit_bytes`` is 1.05 times the artifact and 64 MB. ``private_bytes`` are dirty and
    anonymous pages of the artifact's mappings.
    """

    num_processes: int
    artifact_bytes: int
    shared_bytes: int
    limit_bytes: int
    private_bytes: int
    mapped_bytes: int
    outcomes: tuple[str, ...]
    outputs_equal: bool

    @property
    def is_met(self) -> bool:
        """Whether what is promised holds."""
        return self.shared_bytes <= self.limit_bytes and self.private_bytes == 0 and self.outputs_equal


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


async def measure_memory(folder: Path, nbytes: int, num_processes: int) -> MemoryReading:
    """Make a model and its checkpoint in ``folder``, and stream it in ``num_processes`` processes at once."""
    num_blocks = num_blocks_of(nbytes)
    await anyio.to_thread.run_sync(save_model, folder / "checkpoint", num_blocks)
    command = [sys.executable, "-m", WORKER, str(folder / "checkpoint"), str(folder / "store"), str(num_blocks)]
    async with AsyncExitStack() as stack:
        replicas = []
        for _ in range(num_processes):
            process = await anyio.open_process(command, stderr=None)
            replicas.append(_Replica(await stack.enter_async_context(process)))
        first = await _each(replicas)
        second = await _each(replicas)
        await _tell_all(replicas)
    entry_files = [path.stat().st_size for path in (folder / "store" / "entries").glob("*/*/*.safetensors")]
    return _reading(first, second, sum(entry_files))


async def _tell_all(replicas: Sequence[_Replica]) -> None:
    for replica in replicas:
        await replica.go_on()


async def _each(replicas: Sequence[_Replica]) -> list[dict[str, Any]]:
    await _tell_all(replicas)
    return [await replica.hear() for replica in replicas]


def _reading(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], artifact_bytes: int) -> MemoryReading:
    grown = sum(told["pss"] - told["baseline"] for told in second) - sum(told["own_bytes"] for told in first)
    kinds = [told["mapping"] for told in second]
    return MemoryReading(
        num_processes=len(first),
        artifact_bytes=artifact_bytes,
        shared_bytes=max(0, grown),
        limit_bytes=int(1.05 * artifact_bytes) + SLACK_BYTES,
        private_bytes=sum(kind.get("Private_Dirty", 0) + kind.get("Anonymous", 0) for kind in kinds),
        mapped_bytes=sum(kind.get("Rss", 0) for kind in kinds),
        outcomes=tuple(str(told["outcome"]) for told in first),
        outputs_equal=len({told["digest"] for told in first}) == 1,
    )


@click.command("memory")
@click.option("--size-mb", type=click.IntRange(min=32), default=512, show_default=True, help="Size of the model.")
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True, help="Replicas at once.")
@click.option("--json", "as_json", is_flag=True, help="Print the reading as one JSON object.")
def memory(*, size_mb: int, processes: int, as_json: bool) -> None:
    """Host memory of several processes that stream one model from the store, against the size of its entry."""
    with tempfile.TemporaryDirectory(prefix="streamflow-bench-") as folder:
        reading = anyio.run(measure_memory, Path(folder), size_mb * 1_000_000, processes)
    if as_json:
        print_json({"benchmark": "memory", **attrs.asdict(reading), "is_met": reading.is_met})
        return
    table = fact_table()
    table.add_row("processes", f"{reading.num_processes} ({', '.join(reading.outcomes)})")
    table.add_row("entry", format_bytes(reading.artifact_bytes))
    table.add_row(
        "together, beyond their own", f"{format_bytes(reading.shared_bytes)} of {format_bytes(reading.limit_bytes)}"
    )
    table.add_row("private pages of the entry", format_bytes(reading.private_bytes))
    table.add_row("outputs", "equal" if reading.outputs_equal else "DIFFERENT")
    result_console().print(table)
