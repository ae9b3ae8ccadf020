"""Requests at a constant concurrency, and how many forwards a second they get."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import anyio
import attrs
import torch

import streamflow
from streamflow.stages.threads import open_threads
from streamflow.tools.bench.clock import finish


@attrs.frozen(eq=False)
class Generation:
    """A picture to make: the latents to begin with, what else the model gets, and in how many steps."""

    name: str
    num_steps: int
    latents: torch.Tensor
    conditions: tuple[torch.Tensor, ...] = ()


#: Latents and conditions to a velocity.
Model = Callable[..., torch.Tensor]


class Traffic:
    """Counts the forwards of one measurement: ``num_warm`` are let pass, then ``num_counted`` are timed.

    Callers make requests until `is_over`, so that the concurrency is the same during the whole of it.
    """

    def __init__(self, num_warm: int, num_counted: int) -> None:
        self.digests: dict[str, set[str]] = {}
        self._num_warm, self._num_counted = num_warm, num_counted
        self._ends: list[float] = []
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def is_over(self) -> bool:
        """Whether all forwards to be counted have ended, or nobody wants to know any more."""
        return self._stopped or len(self._ends) >= self._num_warm + self._num_counted

    @property
    def forwards_per_s(self) -> float:
        """Forwards per second between the last one that was let pass and the last one that was counted."""
        last = self._num_warm + self._num_counted - 1
        return self._num_counted / (self._ends[last] - self._ends[self._num_warm - 1])

    def stop(self) -> None:
        """Let every generation end at its next step."""
        self._stopped = True

    @torch.no_grad()
    def generate(self, model: Model, generation: Generation) -> None:
        """One request: every step waits for its own stream, as samplers do that look at what they have."""
        latents = generation.latents
        for _ in range(generation.num_steps):
            velocity = model(latents, *generation.conditions)
            latents = latents - velocity / generation.num_steps
            finish(latents.device)
            with self._lock:
                self._ends.append(time.perf_counter())
            if self._stopped:
                return
        with self._lock:
            self.digests.setdefault(generation.name, set()).add(digest(latents))


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


async def stream(
    offload: streamflow.Offload, model: Model, traffic: Traffic, lanes: Sequence[Sequence[Generation]]
) -> None:
    """Each lane makes its generations one after the other, again and again; the lanes run side by side."""
    async with anyio.create_task_group() as tasks:
        for lane in lanes:
            tasks.start_soon(_stream_lane, offload, model, traffic, lane)


async def _stream_lane(offload: streamflow.Offload, model: Model, traffic: Traffic, lane: Sequence[Generation]) -> None:
    while not traffic.is_over:
        for generation in lane:
            await offload.run(traffic.generate, model, generation)


async def stay_resident(
    model: Model, traffic: Traffic, lanes: Sequence[Sequence[Generation]], device: torch.device
) -> None:
    """The same with a model that is on the device: a thread and a stream of its own for each lane."""
    async with open_threads() as crew, anyio.create_task_group() as tasks:
        for lane in lanes:
            work = partial(_resident_lane, model, traffic, lane, _own_stream(device))
            tasks.start_soon(partial(crew.call, work, on_cancel=traffic.stop, name="resident lane"))


def _resident_lane(
    model: Model, traffic: Traffic, lane: Sequence[Generation], on_stream: AbstractContextManager[object]
) -> None:
    with on_stream:
        while not traffic.is_over:
            for generation in lane:
                traffic.generate(model, generation)


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
