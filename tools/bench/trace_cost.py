"""``streamflow bench trace``: what recording a trace costs, per event and as a share of a walk of 20 ms blocks.

Two offloads of equal models are open at once, one recording and one not, and walk in turn: the share. What an event
costs is measured twice: recorded over and over, as in a busy process, and as the CPU time that a recorded walk takes
more, where the processor comes back from 20 ms of other work and finds nothing in its caches.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import anyio
import attrs
import click
import torch
from torch import nn

import streamflow
from streamflow.hardware import make_device
from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.events import BlockLeft, FetchIssued, FetchStarted, ObservedEvent, SlotFree
from streamflow.stages.testing.blocks import toy_blocks
from streamflow.stages.timing import HostClock
from streamflow.tools.bench.clock import timed_steps
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.flux_shaped import FluxShape, random_inputs, random_model
from streamflow.tools.bench.sleeping import SleepingModel
from streamflow.tools.terminal import fact_table, format_share, print_json, result_console, shown_progress
from streamflow.trace.engine import RecordedEngine
from streamflow.trace.file import read_json
from streamflow.trace.records import RunRecord
from streamflow.trace.ring import Ring

#: What is aimed at: microseconds for each event, and the share of a walk.
AIM_US, AIM_SHARE = 5.0, 0.02
#: Seconds that a block computes on the cpu device, by sleeping, and that its transfer takes.
BLOCK_S, TRANSFER_S = 0.02, 0.01
NUM_BLOCKS, NBYTES = 24, 1 << 20
#: On CUDA: blocks of FLUX.1's shape (2.5 GB), at a size where one computes for about 20 ms.
CUDA_SHAPE, CUDA_PX, CUDA_TEXT = FluxShape(num_double=2, num_single=4), 2048, 512
#: Walks of one reading: the first follows other work, the others are timed.
WALKS_AT_ONCE = 3
#: Events that are kept: so few that old ones are dropped all the time, as in a process that runs for long.
CAPACITY = 400


@attrs.frozen
class TraceCost:
    """Medians over rounds. ``walk_ratio``: the time of a recorded walk over one that is not.

    ``event_us``: an event, recorded over and over. ``event_in_walk_us``: the CPU time of one in a walk. ``cpu_share``:
    that of all events of a walk, over the time of the walk.
    """

    num_rounds: int
    num_blocks: int
    block_s: float
    events_per_walk: float
    walk_ratio: float
    event_us: float
    event_in_walk_us: float
    cpu_share: float


@attrs.frozen
class _Subject:
    """What walks, and how it is called."""

    model: nn.Module
    device: Device
    call: Callable[[], torch.Tensor]
    num_blocks: int


@attrs.frozen
class _Reading:
    """A walk's wall time, and the process's CPU time during it."""

    seconds: float
    cpu_s: float


async def measure_trace_cost(
    device: str | None, num_rounds: int, on_round: Callable[[], None], keep: Path | None = None
) -> TraceCost:
    """The cost on ``device`` (None: cuda where there is one). ``keep``: where the trace is written in the end.

    :raises TraceWriteError: if it cannot be.
    """
    config = streamflow.OffloadConfig(device=device)
    plain, recorded = _subject(config), _subject(config)
    with_trace = attrs.evolve(config, trace_events=CAPACITY)
    async with (
        streamflow.open_offload(plain.model, config, device=plain.device) as without,
        streamflow.open_offload(recorded.model, with_trace, device=recorded.device) as traced,
    ):
        await _walk(without, plain)
        before = 0
        while not before:
            await _walk(traced, recorded)
            before = await _num_dropped(traced)
        pairs: list[tuple[_Reading, _Reading]] = []
        for _ in range(num_rounds):
            pairs.append((await _walk(without, plain), await _walk(traced, recorded)))
            on_round()
        num_events = (await _num_dropped(traced) - before) / num_rounds / WALKS_AT_ONCE
        if keep is not None:
            await traced.write_trace(keep)
    return _cost(pairs, num_events, plain.num_blocks)


def _subject(config: streamflow.OffloadConfig) -> _Subject:
    device = config.torch_device()
    if device.type != "cuda":
        model: nn.Module = SleepingModel(NUM_BLOCKS, NBYTES, BLOCK_S)
        backend = CpuDevice(link_bytes_per_s=NBYTES / TRANSFER_S, compute_units=1)
        return _Subject(model, backend, lambda: model(torch.zeros(1)), NUM_BLOCKS)
    model = random_model(CUDA_SHAPE, torch.bfloat16, device).to("cpu")  # one core takes 10 s to draw so many weights
    inputs = random_inputs(CUDA_SHAPE, CUDA_PX, CUDA_TEXT, torch.bfloat16, device)
    num_blocks = CUDA_SHAPE.num_double + CUDA_SHAPE.num_single
    return _Subject(model, make_device(config), lambda: model(*inputs), num_blocks)


async def _walk(offload: streamflow.Offload, subject: _Subject) -> _Reading:
    def walk() -> _Reading:
        started = time.process_time()
        seconds, _ = timed_steps(subject.call, WALKS_AT_ONCE, offload.config.torch_device())
        return _Reading(statistics.median(seconds), (time.process_time() - started) / WALKS_AT_ONCE)

    return await offload.run(walk)


async def _num_dropped(offload: streamflow.Offload) -> int:
    """Events dropped so far: from the first one on, each that is recorded drops another."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        await offload.write_trace(path)
        return int(read_json(path)["streamflow"]["num_dropped_events"])


def _cost(pairs: list[tuple[_Reading, _Reading]], num_events: float, num_blocks: int) -> TraceCost:
    walk_s = statistics.median(without.seconds for without, _ in pairs)
    cpu_s = statistics.median(traced.cpu_s - without.cpu_s for without, traced in pairs)
    return TraceCost(
        num_rounds=len(pairs),
        num_blocks=num_blocks,
        block_s=walk_s / num_blocks,
        events_per_walk=num_events,
        walk_ratio=statistics.median(traced.seconds / without.seconds for without, traced in pairs),
        event_us=busy_event_us(),
        event_in_walk_us=cpu_s / num_events * 1e6,
        cpu_share=cpu_s / walk_s,
    )


def busy_event_us(num_times: int = 5000) -> float:
    """Microseconds that the recorder takes for an event: the mean over what one block brings about, best of five."""
    blocks = toy_blocks([[256]] * 4)
    recorder = RecordedEngine(0, {"model": blocks.images}, Ring(CAPACITY), HostClock())
    stream = CpuDevice().open_compute_stream("compute")
    event = stream.record()
    happens: list[ObservedEvent] = [
        FetchStarted(1, 0, 3, 256, False),
        FetchIssued(1, 0, 3, event),
        BlockLeft(3, 1, (), event),
        SlotFree(0, 1),
    ]

    def record() -> None:
        for each in happens:
            recorder.note(each)
        mark = recorder.clock.mark(stream)
        recorder.copied("copy", (1, 1), 256, mark, recorder.clock.mark(stream))
        recorder.keep(RunRecord(0, 3, 1, 1, 0.0, 0.0, recorder.clock.mark(stream), recorder.clock.mark(stream)))

    num_events = len(happens) + 2
    return min(timeit.repeat(record, number=num_times, repeat=5)) / num_times / num_events * 1e6


@click.command("trace")
@click.option(
    "--rounds", type=click.IntRange(1), default=6, show_default=True, help="Of walks without and with a trace."
)
@click.option("--device", default=None, help="cuda, cuda:N or cpu; default: cuda where there is one.")
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="Write the trace of the last walks here.")
@click.option("--json", "as_json", is_flag=True, help="Print the reading as one JSON object.")
def trace(rounds: int, device: str | None, keep: Path | None, *, as_json: bool) -> None:
    """Cost of recording a trace: CPU time for each event, and a recorded walk over one that is not."""
    with shown_progress() as progress:
        bar = progress.add_task("rounds", total=rounds)
        cost = anyio.run(measure_trace_cost, device, rounds, lambda: progress.advance(bar), keep)
    if as_json:
        where = environment(streamflow.OffloadConfig(device=device).torch_device())
        print_json({"benchmark": "trace", "environment": where, "reading": attrs.asdict(cost)})
        return
    table = fact_table()
    table.add_row("walk", f"{cost.num_blocks} blocks of {cost.block_s * 1e3:.1f} ms, {cost.events_per_walk:.0f} events")
    table.add_row("recorded walk", f"{cost.walk_ratio:.4f}x one that is not (aim {1 + AIM_SHARE})")
    table.add_row("an event", f"{cost.event_us:.1f} us, recorded over and over (aim {AIM_US:g})")
    table.add_row("an event in a walk", f"{cost.event_in_walk_us:.1f} us of CPU time")
    table.add_row("all events", f"{format_share(cost.cpu_share, 1)} of the walk in CPU time")
    result_console().print(table)
