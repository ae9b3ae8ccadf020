"""How fast this machine copies and gathers: what decides which blocks are better fetched whole by every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import attrs
import torch

from streamflow.ranks.opening import Ranks
from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.ranks.communicator import Communicator
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.threads import ThreadCrew

#: Bytes that each rank copies, and brings to a gather: enough for the rate to be the link's.
SAMPLE_BYTES = 32 << 20
#: What is measured so often; the fastest counts, since the first ones wake things up.
NUM_SAMPLES = 4
#: Bytes of a gather that is all latency.
TINY_BYTES = 256


@attrs.frozen
class LinkRates:
    """Of the host link of one rank while all copy, and of a gather among them: bytes of all slices together."""

    link_bytes_per_s: float
    gather_bytes_per_s: float
    gather_latency_s: float


async def measure_rates(ranks: Ranks, device: Device, crew: ThreadCrew) -> LinkRates:
    """The rates of the slowest rank, the same on all, which all have to call this. For accelerators.

    :raises GatherError: if the ranks cannot gather.
    :raises HostRegistrationError: if host memory cannot be page-locked.
    """
    copies, gathers = device.open_copy_stream("rates"), device.open_communication_stream("rates")
    measure = partial(_measure, ranks.communicator, device, copies, gathers)
    own = await crew.call(measure, on_cancel=ranks.communicator.abort, name="rates")
    answers = [LinkRates(**answer) for answer in await ranks.coordinator.agree("rates", attrs.asdict(own))]
    return LinkRates(
        min(rates.link_bytes_per_s for rates in answers),
        min(rates.gather_bytes_per_s for rates in answers),
        max(rates.gather_latency_s for rates in answers),
    )


def _measure(communicator: Communicator, device: Device, copies: Stream, gathers: Stream) -> LinkRates:
    source, target = allocate_host(SAMPLE_BYTES), device.allocate(communicator.size * SAMPLE_BYTES)
    lock = PageLock(device.registrar, source)
    try:
        copy_s = _fastest(copies, lambda: copies.copy(target[:SAMPLE_BYTES], source))
        gather_s = _fastest(gathers, lambda: _gather(communicator, gathers, target, SAMPLE_BYTES))
        latency_s = _fastest(gathers, lambda: _gather(communicator, gathers, target, TINY_BYTES))
    finally:
        lock.release()
        device.free(target)
    gathered = communicator.size * SAMPLE_BYTES
    return LinkRates(SAMPLE_BYTES / copy_s, gathered / max(gather_s - latency_s, 1e-9), latency_s)


def _gather(communicator: Communicator, stream: Stream, target: torch.Tensor, slice_bytes: int) -> None:
    gathered = target[: communicator.size * slice_bytes]
    stream.submit(partial(communicator.gather, gathered, slice_bytes))


def _fastest(stream: Stream, queue: Callable[[], None]) -> float:
    """The least time of a few, in seconds of host time."""
    times = []
    for _ in range(NUM_SAMPLES):
        started = time.perf_counter()
        with stream.activate():
            queue()
        stream.record().wait()
        times.append(time.perf_counter() - started)
    return min(times)
