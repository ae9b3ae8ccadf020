"""Draws the same digits twice: with a resident model, and with one that streams."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from torch import Tensor

from streamflow.config import OffloadConfig
from streamflow.hardware import make_device
from streamflow.loaded import open_offload
from streamflow.runtime.statistics import OffloadStatistics
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.threads import open_threads
from streamflow.tools.demo.alignment import align_weights
from streamflow.tools.demo.event_log import open_event_log
from streamflow.tools.demo.model import DigitTransformer
from streamflow.tools.demo.sampling import sample

#: Called with the steps done and the number of steps.
OnStep = Callable[[int, int], None]


@attrs.frozen(kw_only=True)
class DrawingOptions:
    """What to draw: ``digits_per_class`` of every class, in ``num_steps`` steps from noise that ``seed`` seeds."""

    seed: int
    num_steps: int
    digits_per_class: int

    def labels(self, model: DigitTransformer) -> list[int]:
        """The class of each digit: a row of the picture for each class."""
        return [label for label in range(model.config.num_classes) for _ in range(self.digits_per_class)]


@attrs.frozen(eq=False)
class Drawing:
    """Digits, float32[N, 1, S, S] on the CPU, and what drawing them took, without any warm-up.

    ``num_threads`` is torch's number of compute threads in the thread that drew.
    """

    images: Tensor
    seconds: float
    num_threads: int

    @property
    def sha256(self) -> str:
        """Of the images' bytes."""
        flat = self.images.contiguous()
        return hashlib.sha256(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())).hexdigest()


@attrs.frozen(eq=False)
class StreamedDrawing:
    """A drawing of a model that streamed; ``statistics`` are of the moment at which the event log ends.

    ``num_events`` are in the log, ``num_lost_events`` are not.
    """

    drawing: Drawing
    statistics: OffloadStatistics
    num_events: int
    num_lost_events: int


async def draw_resident(
    model: DigitTransformer, options: DrawingOptions, config: OffloadConfig, on_step: OnStep
) -> Drawing:
    """What a copy of ``model`` draws that lies whole on the device, in a worker thread; nothing of it streams."""

    def work() -> Drawing:
        resident = copy.deepcopy(model)
        align_weights(resident, make_device(config))
        sample(resident, options.labels(model), seed=options.seed, num_steps=1)  # kernels are chosen and caches made
        return _draw(resident, options, on_step)

    async with open_threads() as crew:
        return await crew.call(work, name="resident model")


async def draw_streamed(
    model: DigitTransformer, options: DrawingOptions, config: OffloadConfig, on_step: OnStep, event_log: Path
) -> StreamedDrawing:
    """What ``model`` draws while its blocks stream; the engine's events go to ``event_log``.

    :raises OSError: if the log cannot be written.

    All that `open_offload` raises, too.
    """
    align_weights(model, CpuDevice())
    async with open_offload(model, config) as offload:
        async with open_event_log(offload, event_log) as log:
            drawing = await offload.run(_draw, model, options, on_step)
        return StreamedDrawing(drawing, log.statistics, log.counts.total(), log.num_lost)


def _draw(model: DigitTransformer, options: DrawingOptions, on_step: OnStep) -> Drawing:
    started = time.perf_counter()
    images = sample(model, options.labels(model), seed=options.seed, num_steps=options.num_steps, on_step=on_step)
    return Drawing(images, time.perf_counter() - started, torch.get_num_threads())
