"""What ``streamflow bench step`` measures: every setting at every picture size, each reading told once it is there."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import torch
from torch import nn

import streamflow
from streamflow.hardware import make_device
from streamflow.stages.progress import tracked
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.tools.bench.clock import timed_steps
from streamflow.tools.bench.digests import digest_of
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.flux_shaped import FluxShape, FluxShaped, random_inputs, random_models
from streamflow.tools.bench.peers import Standard, measure_peers
from streamflow.tools.bench.rates import link_rate, pack_rate, pieces_of
from streamflow.tools.bench.saved_report import SavedReport
from streamflow.tools.bench.step_sources import StepSource
from streamflow.tools.bench.time_limit import TimeLimit

NUM_TEXT_TOKENS = 512


@attrs.frozen
class StepOptions:
    """What to measure. Tuples are swept, the last two for the staged transfer only; see `OffloadConfig` for the rest.

    ``packing_threads``: None in it stands for the default. Files are made in ``folder``.
    """

    shape: FluxShape
    dtype: torch.dtype
    image_px: tuple[int, ...]
    sources: tuple[str, ...]
    transfers: tuple[str, ...]
    packing_threads: tuple[int | None, ...]
    staging_chunk_bytes: tuple[int, ...]
    window_blocks: int
    resident_blocks: int
    num_rounds: int
    steps_per_round: int
    device: str | None
    peers: bool
    steps_per_peer: int
    folder: Path

    def settings(self) -> Iterator[StepSetting]:
        """Every combination of what is swept, but for the picture sizes."""
        for source, transfer in itertools.product(self.sources, self.transfers):
            if transfer == "staged":
                for staging in itertools.product(self.packing_threads, self.staging_chunk_bytes):
                    yield StepSetting(source, transfer, *staging)
            else:
                yield StepSetting(source, transfer)


@attrs.frozen
class StepSetting:
    """One way to stream. ``packing_threads`` and ``staging_chunk_bytes`` are the staged transfer's (None: default)."""

    source: str
    transfer: str
    packing_threads: int | None = None
    staging_chunk_bytes: int | None = None

    def __str__(self) -> str:
        threads = "" if self.packing_threads is None else f", {self.packing_threads} threads"
        chunk = "" if self.staging_chunk_bytes is None else f", {self.staging_chunk_bytes >> 20} MiB"
        return f"{self.transfer} from {self.source}{threads}{chunk}"

    def config(self, options: StepOptions) -> streamflow.OffloadConfig:
        """The offload's options for it."""
        chosen = attrs.asdict(self, filter=lambda field, value: field.name != "source" and value is not None)
        kept = {name: getattr(options, name) for name in ("device", "window_blocks", "resident_blocks")}
        return streamflow.OffloadConfig(**kept, **chosen)


@attrs.frozen
class StepReading:
    """One setting: medians in seconds, bytes of one step, and the ratios that matter. ``digest`` is of the output.

    ``packing_threads`` and ``staging_chunk_bytes`` are None for the direct transfer.
    """

    image_px: int
    transfer: str
    source: str
    packing_threads: int | None
    staging_chunk_bytes: int | None
    staging_bytes: int
    num_resident_blocks: int
    equal: bool
    digest: str
    num_steps: int
    streamed_s: float
    resident_s: float
    streamed_bytes_per_step: float
    link_limit_s: float
    ratio_to_link_limit: float
    ratio_to_resident: float
    ratio_to_slower_of_both: float
    pack_bytes_per_s: float | None
    share_of_pack_or_link: float | None
    hooks_cpu_us_per_block: float
    mailbox_wait_s_per_step: float
    num_mailbox_waits: int
    num_on_demand_fetches: int
    num_slow_device_calls: int
    device_peak_bytes: int
    registered_bytes: int
    registration_s: float


@attrs.frozen
class _Models:
    """The model on the device, and one of the same weights on the host."""

    resident: FluxShaped
    streamed: FluxShaped


class StepMeasurement:
    """One run: `measure` fills ``report``, which is as complete after each reading as it can be then.

    ``on_reading`` is told of each one, on the loop.
    """

    def __init__(
        self, options: StepOptions, limit: TimeLimit, report: SavedReport, on_reading: Callable[[dict[str, Any]], None]
    ) -> None:
        self._options, self._limit, self._report, self._on_reading = options, limit, report, on_reading
        self._device = streamflow.OffloadConfig(device=options.device).torch_device()
        self._readings: list[StepReading] = []
        self._link = 0.0

    async def measure(self) -> None:
        """All readings, with the machine and the rates that they are to be compared with."""
        self._report.set(
            benchmark="step",
            environment=environment(self._device),
            options={
                **attrs.asdict(self._options, filter=lambda field, _: field.name != "folder"),
                "dtype": str(self._options.dtype),
            },
            readings=[],
            peers=[],
            left_out=self._limit.left_out,
        )
        async with open_threads() as crew:
            await self._measure_link(crew)
            models = await crew.call(self._make_models, name="models")
            for setting in self._options.settings():
                await self._measure_setting(setting, models, crew)
        del models  # peers make their own
        if self._options.peers:
            await self._measure_peers()
        self._report.save()

    async def _measure_link(self, crew: ThreadCrew) -> None:
        device = make_device(streamflow.OffloadConfig(device=self._options.device))
        await device.open(crew)
        copy_bytes = (1 << 30) if self._device.type == "cuda" else (64 << 20)
        stream = device.open_copy_stream("link rate")
        self._link = await crew.call(partial(link_rate, device, stream, copy_bytes), name="link rate")
        device.close()
        self._report.set(link_bytes_per_s=self._link)

    def _make_models(self) -> _Models:
        return _Models(*random_models(self._options.shape, self._options.dtype, self._device))

    async def _measure_setting(self, setting: StepSetting, models: _Models, crew: ThreadCrew) -> None:
        sizes = [px for px in self._options.image_px if self._limit.is_before(f"{setting}, {px} px")]
        if not sizes:
            return
        config = setting.config(self._options)
        source = StepSource(setting.source, self._options.shape, self._options.dtype, self._options.folder)
        pack = await _pack_rate(config, models.streamed, crew) if setting.transfer == "staged" else None
        async with source.opened(models.streamed, config) as (offload, streamed):
            for image_px in sizes:
                if self._limit.is_before(f"{setting}, {image_px} px"):
                    size = _Size(self._options, setting, image_px, self._link, pack)
                    self._add(await size.measure(offload, models.resident, streamed))

    def _add(self, reading: StepReading) -> None:
        self._readings.append(reading)
        self._tell("readings", attrs.asdict(reading))

    def _tell(self, kind: str, reading: dict[str, Any]) -> None:
        self._report.add(kind, reading)
        self._on_reading(reading)

    async def _measure_peers(self) -> None:
        """Peers against the first reading of each size; they keep no block on the device, so it should have none."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        first = {reading.image_px: reading for reading in reversed(self._readings)}
        standards = [
            Standard(px, reading.link_limit_s, reading.resident_s, reading.digest)
            for px, reading in sorted(first.items())
        ]
        options = self._options
        peers = measure_peers(
            standards, options.shape, options.dtype, NUM_TEXT_TOKENS, options.steps_per_peer, self._device, self._limit
        )
        async for reading in peers:
            self._tell("peers", attrs.asdict(reading))


async def _pack_rate(config: streamflow.OffloadConfig, model: FluxShaped, crew: ThreadCrew) -> float:
    num_threads = config.effective_packing_threads
    return await pack_rate(pieces_of(model), crew, num_threads, config.staging_chunk_bytes, seconds=0.5)


@attrs.frozen
class _Size:
    """One setting at one picture size. ``link`` and ``pack``: bytes per second; None: nothing is packed."""

    options: StepOptions
    setting: StepSetting
    image_px: int
    link: float
    pack: float | None

    async def measure(self, offload: streamflow.Offload, resident: FluxShaped, model: nn.Module) -> StepReading:
        """Its reading: resident and streamed steps in rounds, after one of each that does not count."""
        options, device = self.options, offload.config.torch_device()
        inputs = random_inputs(options.shape, self.image_px, NUM_TEXT_TOKENS, options.dtype, device)
        run = partial(timed_steps, num_steps=options.steps_per_round, device=device)
        await offload.run(run, lambda: model(*inputs))  # warm-up: kernels are chosen, the order is learned
        await anyio.to_thread.run_sync(run, lambda: resident(*inputs))
        before, alone_s, streamed_s = offload.statistics(), [], []
        for _ in tracked("rounds", range(options.num_rounds)):
            seconds, expected = await anyio.to_thread.run_sync(run, lambda: resident(*inputs))
            alone_s += seconds
            seconds, found = await offload.run(run, lambda: model(*inputs))
            streamed_s += seconds
        digests = digest_of(expected), digest_of(found)
        return self._reading(before, offload.statistics(), streamed_s, statistics.median(alone_s), digests)

    def _reading(
        self,
        before: streamflow.OffloadStatistics,
        now: streamflow.OffloadStatistics,
        streamed_s: list[float],
        alone_s: float,
        digests: tuple[str, str],
    ) -> StepReading:
        num_passes = now.engine.num_passes - before.engine.num_passes
        num_blocks = max(1, now.engine.num_blocks_run - before.engine.num_blocks_run)
        bytes_per_step = (now.engine.streamed_bytes - before.engine.streamed_bytes) / num_passes
        step_s, limit_s = statistics.median(streamed_s), bytes_per_step / self.link
        is_staged = now.choice.transfer == "staged"
        return StepReading(
            image_px=self.image_px,
            transfer=now.choice.transfer,
            source=now.choice.source,
            packing_threads=self.setting.config(self.options).effective_packing_threads if is_staged else None,
            staging_chunk_bytes=self.setting.config(self.options).staging_chunk_bytes if is_staged else None,
            staging_bytes=now.engine.staging_bytes,
            num_resident_blocks=now.num_resident_blocks,
            equal=digests[0] == digests[1],
            digest=digests[0],
            num_steps=len(streamed_s),
            streamed_s=step_s,
            resident_s=alone_s,
            streamed_bytes_per_step=bytes_per_step,
            link_limit_s=limit_s,
            ratio_to_link_limit=step_s / limit_s,
            ratio_to_resident=step_s / alone_s,
            ratio_to_slower_of_both=step_s / max(limit_s, alone_s),
            pack_bytes_per_s=self.pack,
            share_of_pack_or_link=None if self.pack is None else bytes_per_step / step_s / min(self.pack, self.link),
            hooks_cpu_us_per_block=(now.engine.hooks_cpu_s - before.engine.hooks_cpu_s) / num_blocks * 1e6,
            mailbox_wait_s_per_step=(now.engine.mailbox_wait_s - before.engine.mailbox_wait_s) / num_passes,
            num_mailbox_waits=now.engine.num_mailbox_waits - before.engine.num_mailbox_waits,
            num_on_demand_fetches=now.engine.num_on_demand_fetches - before.engine.num_on_demand_fetches,
            num_slow_device_calls=now.engine.num_slow_device_calls - before.engine.num_slow_device_calls,
            device_peak_bytes=now.engine.device_peak_bytes,
            registered_bytes=now.registration.registered_bytes,
            registration_s=now.registration.seconds,
        )
