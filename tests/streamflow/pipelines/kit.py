"""How whole pipelines are shown to be exact: a resident one with aligned weights, and what memory they may take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

import streamflow
from streamflow import Offload, OffloadStatistics
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import ModelState, aligned, aligned_reference, in_worker, sha256_of, streamflow_threads
from tests.streamflow.pipelines.families.family import Family, modules_of


@attrs.frozen(eq=False)
class Ready:
    """A family's pipeline, whose weights are aligned as they are in a slot, and the digests that it gives resident."""

    family: Family
    pipeline: Any
    images: list[str]
    latents: list[str]

    async def check(self, offload: Offload, seed: int = 0) -> None:
        """Fail unless one request gives what the resident pipeline gave."""
        assert sha256_of(await offload.run(self.family.generate, self.pipeline, seed)) == self.images[seed]


def ready(family: Family, num_seeds: int = 1) -> Ready:
    """The pipeline, and what it gives for the first seeds."""
    pipeline = family.build()
    for name, module in modules_of(pipeline).items():
        setattr(pipeline, name, aligned_reference(module))
    images = [in_worker(lambda seed=seed: family.generate(pipeline, seed)) for seed in range(num_seeds)]
    latents = [in_worker(lambda seed=seed: family.latents(pipeline, seed)) for seed in range(num_seeds)]
    return Ready(family, pipeline, list(map(sha256_of, images)), list(map(sha256_of, latents)))


@asynccontextmanager
async def open_ready(
    given: Ready, options: Mapping[str, Any] | None = None, device: CpuDevice | None = None
) -> AsyncIterator[Offload]:
    """The pipeline, open; fails if it is not left as it was found, or something is left on the device."""
    before = {name: ModelState.of(module) for name, module in modules_of(given.pipeline).items()}
    attributes = dict(vars(given.pipeline))
    threads = streamflow_threads()
    backend = device if device is not None else CpuDevice()
    options = {"poison_freed_slots": True, **(options or {})}
    async with streamflow.open_offload(given.pipeline, options, device=backend) as offload:
        yield offload
        check_memory(offload.statistics())
    assert offload.state == "closed"
    assert backend.memory().in_use == 0
    assert streamflow_threads() == threads
    assert vars(given.pipeline) == attributes
    for name, module in modules_of(given.pipeline).items():
        before[name].assert_unchanged(module)


async def always_bytes(given: Ready) -> int:
    """What an accelerator would have all the time beside the window: a host that is the device has it in place."""
    async with streamflow.open_offload(given.pipeline, device=FarCpuDevice()) as offload:
        return offload.statistics().fixed_bytes


def check_memory(statistics: OffloadStatistics) -> None:
    """Fail unless the peak is at most window, residents, what is always there, and what was admitted."""
    engine, staging = statistics.engine, statistics.staging
    assert staging is not None
    always = engine.window_bytes + engine.resident_bytes + engine.scratch_bytes + aligned(statistics.fixed_bytes)
    assert engine.device_peak_bytes <= always + staging.staged_peak_bytes
    assert staging.budget_bytes is None or staging.staged_peak_bytes <= staging.budget_bytes
    assert engine.device_in_use_bytes <= engine.device_peak_bytes
    assert (engine.num_late_messages, engine.num_dropped_events) == (0, 0)


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of the module's parameters, each once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def resident_set_bytes() -> int:
    """What the process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
