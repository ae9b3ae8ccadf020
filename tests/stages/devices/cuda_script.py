"""A small script that stands for `torch.cuda`: what the cuda device calls, without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch

from streamflow.stages.devices import cuda as cuda_module

#: Streams that torch hands out in turn, for each device and priority.
POOL_SIZE = 32


@attrs.define(eq=False)
class FakeStream:
    """A stream of torch's pool: ``cuda_stream`` is its handle."""

    cuda_stream: int
    waited_for: list[FakeEvent] = attrs.field(factory=list)
    failure: RuntimeError | None = None

    def wait_event(self, event: FakeEvent) -> None:
        if self.failure is not None:
            raise self.failure
        self.waited_for.append(event)


@attrs.define(eq=False)
class FakeEvent:
    """An event that has happened, unless its stream failed."""

    blocking: bool = False
    recorded_on: FakeStream | None = None
    cuda_event: int = attrs.field(factory=itertools.count(5000).__next__)

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        self._check()
        return True

    def synchronize(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.recorded_on is not None and self.recorded_on.failure is not None:
            raise self.recorded_on.failure


@attrs.define(eq=False)
class FakeRuntime:
    """The calls of the CUDA runtime that we make ourselves, what they are to return, and the error it keeps."""

    register_code: int = 0
    unregister_code: int = 0
    pending: int | None = None
    calls: list[tuple[str, int, int, int]] = attrs.field(factory=list)
    failure: RuntimeError | None = None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.failure is not None:
            raise self.failure
        self.calls.append(("register", address, nbytes, flags))
        self.pending = self.register_code or None
        return self.register_code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0, 0))
        self.pending = self.unregister_code or None
        return self.unregister_code


@attrs.define(eq=False)
class FakeCuda:
    """One device: a pool of streams, a current stream, free memory and what is active."""

    runtime: FakeRuntime = attrs.field(factory=FakeRuntime)
    free_bytes: int = 10_000
    current: FakeStream = attrs.field(factory=lambda: FakeStream(0))
    active: list[FakeStream] = attrs.field(factory=list)
    num_streams: Iterator[int] = attrs.field(factory=itertools.count)
    device: torch.device | None = None

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def new_stream(self, device: torch.device) -> FakeStream:
        assert device == torch.device("cuda", 3)
        return FakeStream(1000 + next(self.num_streams) % POOL_SIZE)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.active.append(stream)
        yield
        self.active.pop()

    def cudart(self) -> FakeRuntime:
        assert self.device == torch.device("cuda", 3), "the context of another device would be used"
        return self.runtime

    def empty(self, nbytes: int, *, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        assert device == torch.device("cuda", 3)
        if self.runtime.pending is not None:  # simpler than in truth, where the launch after it raises
            pending, self.runtime.pending = self.runtime.pending, None
            raise RuntimeError(f"CUDA error: {pending}")
        if nbytes > self.free_bytes:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.free_bytes -= nbytes
        return REAL_EMPTY(nbytes, dtype=dtype)


REAL_EMPTY = torch.empty


def installed(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A script, in the place of `torch.cuda`."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda_module, "_STREAMS", cuda_module._StreamRegistry())
    monkeypatch.setattr(cuda_module, "driver_queue", lambda: None)
    monkeypatch.setattr(torch, "empty", fake.empty)
    for name, value in {
        "Event": FakeEvent,
        "device": fake.on_device,
        "Stream": fake.new_stream,
        "stream": fake.stream,
        "current_stream": lambda device: fake.current,
        "current_device": lambda: 3,
        "cudart": fake.cudart,
        "mem_get_info": lambda device: (fake.free_bytes, 10_000),
        "memory_reserved": lambda device: 700,
        "memory_allocated": lambda device: 300,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake
