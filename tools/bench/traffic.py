"""Requests side by side, and how many forwards a second they get."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
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


@attrs.define(eq=False)
class Lane:
    """Generations that one requester makes one after the other, again and again, and how far it got."""

    generations: Sequence[Generation]
    num_forwards: int = 0


class Traffic:
    """Times ``forwards_per_lane`` forwards of each of ``num_lanes`` lanes that run side by side.

    Each lane's first forward is let pass; when all have made it the clock starts, and it ends with the last lane. So
    every mode does the same work, whatever the sizes of the lanes. Nobody waits for others for longer than ``limit_s``.
    """

    def __init__(self, num_lanes: int, forwards_per_lane: int, limit_s: float) -> None:
        self.digests: dict[str, set[str]] = {}
        self._num_lanes, self._per_lane = num_lanes, forwards_per_lane
        self._start = threading.Barrier(num_lanes, self._note_start, limit_s)
        self._started_at = 0.0
        self._ends: list[float] = []
        self._lock = threading.Lock()
        self._stopped = False

    def _note_start(self) -> None:
        self._started_at = time.perf_counter()

    @property
    def forwards_per_s(self) -> float:
        """Forwards of all lanes over the time that they took together."""
        return self._num_lanes * self._per_lane / (max(self._ends) - self._started_at)

    def is_over(self, lane: Lane) -> bool:
        """Whether the lane has made all that is counted, or nobody wants to know any more."""
        return self._stopped or lane.num_forwards > self._per_lane

    def stop(self) -> None:
        """Let every lane end at its next step."""
        self._stopped = True
        self._start.abort()

    @torch.no_grad()
    def generate(self, model: Model, lane: Lane, generation: Generation) -> None:
        """One request: every step waits for its own stream, as samplers do that look at what they have."""
        latents = generation.latents
        for _ in range(generation.num_steps):
            if self.is_over(lane):
                return
            velocity = model(latents, *generation.conditions)
            latents = latents - velocity / generation.num_steps
            finish(latents.device)
            self._note_forward(lane)
        with self._lock:
            self.digests.setdefault(generation.name, set()).add(digest(latents))

    def _note_forward(self, lane: Lane) -> None:
        lane.num_forwards += 1
        if lane.num_forwards == 1:
            with suppress(threading.BrokenBarrierError):  # it was stopped
                self._start.wait()
        elif lane.num_forwards == self._per_lane + 1:
            with self._lock:
                self._ends.append(time.perf_counter())


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


async def stream(offload: streamflow.Offload, model: Model, traffic: Traffic, lanes: Sequence[Lane]) -> None:
    """The lanes' requests, side by side, to an offload."""
    async with anyio.create_task_group() as tasks:
        for lane in lanes:
            tasks.start_soon(_stream_lane, offload, model, traffic, lane)


async def _stream_lane(offload: streamflow.Offload, model: Model, traffic: Traffic, lane: Lane) -> None:
    for generation in itertools.cycle(lane.generations):
        if traffic.is_over(lane):
            return
        await offload.run(traffic.generate, model, lane, generation)


async def stay_resident(model: Model, traffic: Traffic, lanes: Sequence[Lane], device: torch.device) -> None:
    """The same with a model that is on the device: a thread and a stream of its own for each lane."""
    async with open_threads() as crew, anyio.create_task_group() as tasks:
        for lane in lanes:
            work = partial(_resident_lane, model, traffic, lane, _own_stream(device))
            tasks.start_soon(partial(crew.call, work, on_cancel=traffic.stop, name="resident lane"))


def _resident_lane(model: Model, traffic: Traffic, lane: Lane, on_stream: AbstractContextManager[object]) -> None:
    with on_stream:
        for generation in itertools.cycle(lane.generations):
            if traffic.is_over(lane):
                return
            traffic.generate(model, lane, generation)


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
