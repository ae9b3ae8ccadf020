"""The clock of a CUDA device: marks are on the host's clock, in the order of the stream, and cost little."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import streamflow
from streamflow.stages.devices.cuda import CudaDevice, CudaStream
from streamflow.stages.devices.cuda_clock import CudaClock
from streamflow.stages.testing.walker import open_device
from streamflow.tools.bench.flux_shaped import SMALL, random_inputs, random_model
from streamflow.trace.file import read_json
from streamflow.trace.schema import problems_of

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

#: Of marks against the host's clock: twice what was measured at the worst on a busy device.
TOLERANCE_S = 0.0002


def clock_of(device: CudaDevice) -> CudaClock:
    stream = device.open_copy_stream("clock")
    assert isinstance(stream, CudaStream)
    clock = CudaClock(stream)
    clock.sync()
    return clock


async def test_a_mark_is_when_the_host_sees_it() -> None:
    device = CudaDevice()
    async with open_device(device) as crew:
        clock, stream = clock_of(device), device.open_copy_stream("copy")

        def measure() -> None:
            source = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
            target = torch.empty_like(source, device=device.torch_device)
            for _ in range(20):
                before = time.perf_counter()
                begin = clock.mark(stream)
                stream.copy(target, source)
                end = clock.mark(stream)
                stream.record().wait()
                after = time.perf_counter()
                begun, ended = begin.seconds(), end.seconds()
                assert begun is not None
                assert ended is not None
                assert before - TOLERANCE_S < begun < ended < after + TOLERANCE_S
                assert ended - begun > source.numel() / 200e9

        await crew.call(measure)


async def test_what_has_not_happened_has_no_time_and_old_events_are_used_again() -> None:
    device = CudaDevice()
    async with open_device(device) as crew:
        clock, stream = clock_of(device), device.open_copy_stream("copy")

        def measure() -> None:
            with stream.activate():
                torch.cuda._sleep(100_000_000)
            mark = clock.mark(stream)
            assert mark.seconds() is None
            stream.record().wait()
            assert mark.seconds() is not None
            marks = [clock.mark(stream) for _ in range(1000)]
            stream.record().wait()
            times = [mark.seconds() for mark in marks]
            assert times == sorted(times)  # type: ignore[type-var]
            assert len(clock._free) < 500  # each mark of a stream that is idle found one that had been read

        await crew.call(measure)


async def test_a_streamed_model_leaves_a_sound_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    model = random_model(SMALL, torch.float32, torch.device("cpu"))
    inputs = random_inputs(SMALL, 256, 64, torch.float32, torch.device("cuda"))
    config = streamflow.OffloadConfig(device="cuda", trace_path=path)
    async with streamflow.open_offload(model, config) as offload:
        for _ in range(3):
            with torch.no_grad():
                await offload.run(model, *inputs)
    trace = read_json(path)
    assert problems_of(trace) == []
    assert trace["streamflow"]["num_unfinished_spans"] == 0
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    copied = {event["args"]["fetch"]: event["ts"] + event["dur"] for event in spans if event["cat"] == "copy"}
    ran = [event for event in spans if event["cat"] == "block"]
    assert len(ran) == 3 * (SMALL.num_double + SMALL.num_single)
    assert all(event["ts"] + 50 >= copied[event["args"]["fetch"]] for event in ran)
