"""The trace of an offload: begun when it opens, written on demand, when it fails, and when it closes."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch

from streamflow._version import __version__
from streamflow.config import OffloadConfig
from streamflow.interrupts import uninterrupted
from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cuda import CudaStream
from streamflow.stages.devices.cuda_clock import CudaClock
from streamflow.stages.images import BlockImage
from streamflow.stages.threads import ThreadCrew, open_tasks
from streamflow.stages.timing import DeviceClock, HostClock
from streamflow.trace.chrome import TraceDocument, chrome_trace
from streamflow.trace.engine import EngineTrace, RecordedEngine
from streamflow.trace.errors import TraceOffError, TraceWriteError
from streamflow.trace.file import check_writable, write_json
from streamflow.trace.ring import Ring

#: Seconds after which the device's clock is related to the host's anew.
SYNC_EVERY_S = 5.0
#: Readings of the host's clocks at the beginning.
NUM_READINGS = 5


class Tracing:
    """No trace: nothing is recorded. Base of `RecordedTracing`."""

    def engine(self, components: Mapping[str, Mapping[int, BlockImage]]) -> EngineTrace:
        """What is to be told of an engine with these components, given by their images as for `open_engine`."""
        return EngineTrace()

    def describe(self, **facts: Any) -> None:
        """Put ``facts`` (plain values) into the trace's metadata."""

    def join(self, rank: int, size: int, run: str) -> None:
        """What is recorded is that of ``rank``, one of ``size`` that gather; all of them have the same ``run``."""

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write what is recorded now; ``.gz`` at the end of the name compresses. Blocks; from any thread.

        :raises TraceOffError: if nothing is recorded.
        :raises TraceWriteError: if the file cannot be written; one that was there is still there then.
        """
        raise TraceOffError


class RecordedTracing(Tracing):
    """Records up to ``capacity`` events of all engines of one device."""

    def __init__(self, capacity: int, clock: DeviceClock) -> None:
        self.ring = Ring(capacity)
        self.clock = clock
        self.engines: list[RecordedEngine] = []
        self.failed = anyio.Event()
        self._zero_s, self._zero_unix_ns = _read_clocks()
        self._facts: dict[str, Any] = {}
        self._rank = 0

    def engine(self, components: Mapping[str, Mapping[int, BlockImage]]) -> EngineTrace:
        engine = RecordedEngine(len(self.engines), components, self.ring, self.clock)
        engine.on_failure = self.failed.set
        self.engines.append(engine)
        return engine

    def describe(self, **facts: Any) -> None:
        self._facts |= facts

    def join(self, rank: int, size: int, run: str) -> None:
        self._rank = rank
        self.describe(ranks={"size": size, "run": run})

    def document(self) -> TraceDocument:
        """What is recorded now, as it is written. Takes a while; not on a loop."""
        entries, num_dropped = self.ring.snapshot()
        metadata = {
            "clock": {"unix_ns_at_zero": self._zero_unix_ns},
            "num_dropped_events": num_dropped,
            "capacity_events": self.ring.capacity,
            "versions": {
                "streamflow": __version__,
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "python": platform.python_version(),
            },
            "num_cores": len(os.sched_getaffinity(0)),
            **self._facts,
        }
        return chrome_trace(entries, self.engines, self._zero_s, metadata, self._rank)

    def write(self, path: str | os.PathLike[str]) -> None:
        self.clock.sync()
        try:
            write_json(Path(path), self.document())
        except OSError as failure:
            raise TraceWriteError(os.fspath(path), failure) from failure


@asynccontextmanager
async def open_tracing(config: OffloadConfig, device: Device, crew: ThreadCrew) -> AsyncIterator[Tracing]:
    """The trace that ``config`` asks for. Leaving writes it to ``trace_path``, if there is one; a failure does before.

    :raises TraceWriteError: if the file cannot be written; where the body failed, that is noted on its error instead.
    """
    if config.effective_trace_events is None:
        yield Tracing()
        return
    path = None if config.trace_path is None else Path(config.trace_path)
    if path is not None:
        await crew.call(partial(_check, path), name="look at the trace's folder")
    clock = _make_clock(device)
    await crew.call(clock.sync, name="trace clock")
    tracing = RecordedTracing(config.effective_trace_events, clock)
    tracing.describe(config=config.effective(), device=_device_facts(device))
    async with _written_on_leaving(tracing, path, crew), open_tasks() as tasks:
        if path is not None:
            tasks.start_soon(_write_on_failure, tracing, path, crew, name="trace of a failure")
        if not device.is_host:
            tasks.start_soon(_keep_in_sync, clock, crew, name="trace clock")
        try:
            yield tracing
        finally:
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _written_on_leaving(tracing: RecordedTracing, path: Path | None, crew: ThreadCrew) -> AsyncIterator[None]:
    try:
        yield
    except BaseException as failure:
        if path is not None:
            try:
                await crew.call_through(partial(tracing.write, path))
            except TraceWriteError as unwritten:
                failure.add_note(str(unwritten))
        raise
    else:
        if path is not None:
            await crew.call_through(partial(tracing.write, path))


@uninterrupted
async def _write_on_failure(tracing: RecordedTracing, path: Path, crew: ThreadCrew) -> None:
    await tracing.failed.wait()
    try:
        await crew.call_through(partial(tracing.write, path))
    except TraceWriteError:
        return  # it is tried again on closing, which tells


@uninterrupted
async def _keep_in_sync(clock: DeviceClock, crew: ThreadCrew) -> None:
    while True:
        await anyio.sleep(SYNC_EVERY_S)
        await crew.call_through(clock.sync)


def _read_clocks() -> tuple[float, int]:
    """Now, on `time.perf_counter` and on the wall: what relates this trace to others of the same machine.

    Of a few readings the quickest, as a thread may be interrupted in the midst of one.
    """
    readings = []
    for _ in range(NUM_READINGS):
        begin, unix_ns = time.perf_counter(), time.time_ns()
        readings.append((time.perf_counter() - begin, begin, unix_ns))
    return min(readings)[1:]


def _check(path: Path) -> None:
    try:
        check_writable(path)
    except OSError as failure:
        raise TraceWriteError(str(path), failure) from failure


def _make_clock(device: Device) -> DeviceClock:
    if device.torch_device.type == "cuda":
        stream = device.open_copy_stream("trace clock")
        if isinstance(stream, CudaStream):
            return CudaClock(stream)
    return HostClock()


def _device_facts(device: Device) -> dict[str, Any]:
    torch_device = device.torch_device
    name = torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else platform.machine()
    return {"name": str(torch_device), "model": name, "is_host": device.is_host}
