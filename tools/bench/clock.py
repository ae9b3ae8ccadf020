"""Marks on a device's own time line, so that timing a step does not make the host wait for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Mark(Protocol):
    """A moment in the current stream's work."""

    def seconds_since(self, earlier: Mark) -> float:
        """From ``earlier`` to this one; both must have happened."""


class _CpuMark:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        if not isinstance(earlier, _CpuMark):
            raise TypeError("marks of two devices cannot be compared")
        return self.at - earlier.at


class _CudaMark:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_since(self, earlier: Mark) -> float:
        if not isinstance(earlier, _CudaMark):
            raise TypeError("marks of two devices cannot be compared")
        return float(earlier.event.elapsed_time(self.event)) / 1000


def mark(device: torch.device) -> Mark:
    """Now, in the calling thread's stream on ``device``."""
    return _CudaMark() if device.type == "cuda" else _CpuMark()


def finish(device: torch.device) -> None:
    """Wait for the calling thread's own stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def timed_steps(
    step: Callable[[], torch.Tensor], num_steps: int, device: torch.device
) -> tuple[list[float], torch.Tensor]:
    """Seconds from the end of each step to the end of the next, and the last result.

    The first of ``num_steps`` steps is not counted: it may find blocks that were prefetched while nothing ran.
    """
    marks: list[Mark] = []
    result = None
    with torch.no_grad():
        for _ in range(num_steps):
            result = step()
            marks.append(mark(device))
        finish(device)
    if result is None:
        raise ValueError("at least one step is needed")
    return intervals(marks), result


def intervals(marks: Sequence[Mark]) -> list[float]:
    """Seconds between neighbours."""
    return [later.seconds_since(earlier) for earlier, later in itertools.pairwise(marks)]
