"""``streamflow bench step``: one step of a FLUX.1-shaped transformer, streamed against resident and the link limit.

Both models are in one process and their steps are interleaved in rounds. Within a round steps follow each other without
a host wait, as in a denoising loop, and are timed from end to end on the device's clock; the first of each round is
left out, because blocks were prefetched for it while the other model ran.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import click
import torch
from torch import nn

import streamflow
from streamflow.hardware import make_device
from streamflow.stages.progress import tracked
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.tools.bench.clock import timed_steps
from streamflow.tools.bench.digests import digest_of
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.flux_shaped import SMALL, FluxShape, FluxShaped, random_inputs, random_models
from streamflow.tools.bench.peers import PeerReading, Standard, measure_peers
from streamflow.tools.bench.rates import link_rate, pack_rate, pieces_of
from streamflow.tools.bench.step_sources import SOURCES, StepSource
from streamflow.tools.terminal import plain_table, print_json, result_console, shown_progress

NUM_TEXT_TOKENS = 512


@attrs.frozen
class StepOptions:
    """What to measure. ``image_px``, ``sources`` and ``transfers`` are swept; see `OffloadConfig` for the rest.

    Files are made in ``folder``.
    """

    shape: FluxShape
    dtype: torch.dtype
    image_px: tuple[int, ...]
    sources: tuple[str, ...]
    transfers: tuple[str, ...]
    window_blocks: int
    resident_blocks: int
    num_rounds: int
    steps_per_round: int
    packing_threads: int | None
    staging_chunk_bytes: int
    device: str | None
    peers: bool
    folder: Path


@attrs.frozen
class StepReading:
    """One setting: medians in seconds, bytes of one step, and the ratios that matter. ``digest`` is of the output."""

    image_px: int
    transfer: str
    source: str
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


async def measure(options: StepOptions) -> dict[str, Any]:
    """All readings of one run, with the machine and the rates that they are to be compared with."""
    config = streamflow.OffloadConfig(device=options.device, window_blocks=options.window_blocks)
    torch_device = config.torch_device()
    readings: list[StepReading] = []
    async with open_threads() as crew:
        device = make_device(config)
        await device.open(crew)
        copy_bytes = (1 << 30) if torch_device.type == "cuda" else (64 << 20)
        link = await crew.call(
            partial(link_rate, device, device.open_copy_stream("link rate"), copy_bytes), name="link rate"
        )
        resident, model = await crew.call(
            lambda: random_models(options.shape, options.dtype, torch_device), name="models"
        )
        for name, transfer in itertools.product(options.sources, options.transfers):
            source = StepSource(name, options.shape, options.dtype, options.folder)
            pack = await _pack_rate(options, model, crew) if transfer == "staged" else None
            readings += await _measure_transfer(options, source, transfer, resident, model, link, pack)
        device.close()
        del resident, model  # peers make their own
    peers = await _measure_peers(options, readings, torch_device) if options.peers else []
    return {
        "benchmark": "step",
        "environment": environment(torch_device),
        "options": {
            **attrs.asdict(options, filter=lambda field, _: field.name != "folder"),
            "dtype": str(options.dtype),
        },
        "link_bytes_per_s": link,
        "readings": [attrs.asdict(reading) for reading in readings],
        "peers": [attrs.asdict(reading) for reading in peers],
    }


async def _measure_peers(
    options: StepOptions, readings: Sequence[StepReading], device: torch.device
) -> list[PeerReading]:
    """Peers against the first reading of each size; they keep no block on the device, so it should have none either."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    first = {reading.image_px: reading for reading in reversed(readings)}
    standards = [
        Standard(px, first[px].link_limit_s, first[px].resident_s, first[px].digest) for px in options.image_px
    ]
    return await measure_peers(
        standards, options.shape, options.dtype, NUM_TEXT_TOKENS, options.steps_per_round, device
    )


async def _pack_rate(options: StepOptions, model: FluxShaped, crew: ThreadCrew) -> float:
    config = streamflow.OffloadConfig(packing_threads=options.packing_threads)
    return await pack_rate(
        pieces_of(model), crew, config.effective_packing_threads, options.staging_chunk_bytes, seconds=2.0
    )


async def _measure_transfer(
    options: StepOptions,
    source: StepSource,
    transfer: str,
    resident: FluxShaped,
    model: FluxShaped,
    link: float,
    pack: float | None,
) -> list[StepReading]:
    config = {
        "device": options.device,
        "window_blocks": options.window_blocks,
        "resident_blocks": options.resident_blocks,
        "transfer": transfer,
        "packing_threads": options.packing_threads,
        "staging_chunk_bytes": options.staging_chunk_bytes,
    }
    async with source.opened(model, config) as (offload, streamed):
        return [
            await _measure_size(options, offload, image_px, resident, streamed, link, pack)
            for image_px in options.image_px
        ]


async def _measure_size(
    options: StepOptions,
    offload: streamflow.Offload,
    image_px: int,
    resident: FluxShaped,
    model: nn.Module,
    link: float,
    pack: float | None,
) -> StepReading:
    device = offload.config.torch_device()
    inputs = random_inputs(options.shape, image_px, NUM_TEXT_TOKENS, options.dtype, device)
    run = partial(timed_steps, num_steps=options.steps_per_round, device=device)
    streamed_s: list[float] = []
    resident_s: list[float] = []
    await offload.run(run, lambda: model(*inputs))  # warm-up: kernels are chosen, the order is learned
    await anyio.to_thread.run_sync(run, lambda: resident(*inputs))
    before = offload.statistics().engine
    for _ in tracked("rounds", range(options.num_rounds)):
        seconds, expected = await anyio.to_thread.run_sync(run, lambda: resident(*inputs))
        resident_s += seconds
        seconds, found = await offload.run(run, lambda: model(*inputs))
        streamed_s += seconds
    statistics_now = offload.statistics()
    engine = statistics_now.engine
    num_passes = engine.num_passes - before.num_passes
    bytes_per_step = (engine.streamed_bytes - before.streamed_bytes) / num_passes
    step_s, alone_s = statistics.median(streamed_s), statistics.median(resident_s)
    limit_s = bytes_per_step / link
    rate = bytes_per_step / step_s
    return StepReading(
        image_px=image_px,
        transfer=statistics_now.choice.transfer,
        source=statistics_now.choice.source,
        num_resident_blocks=statistics_now.num_resident_blocks,
        equal=digest_of(expected) == digest_of(found),
        digest=digest_of(expected),
        num_steps=len(streamed_s),
        streamed_s=step_s,
        resident_s=alone_s,
        streamed_bytes_per_step=bytes_per_step,
        link_limit_s=limit_s,
        ratio_to_link_limit=step_s / limit_s,
        ratio_to_resident=step_s / alone_s,
        ratio_to_slower_of_both=step_s / max(limit_s, alone_s),
        pack_bytes_per_s=pack,
        share_of_pack_or_link=None if pack is None else rate / min(pack, link),
        hooks_cpu_us_per_block=(engine.hooks_cpu_s - before.hooks_cpu_s)
        / max(1, engine.num_blocks_run - before.num_blocks_run)
        * 1e6,
        mailbox_wait_s_per_step=(engine.mailbox_wait_s - before.mailbox_wait_s) / num_passes,
        num_mailbox_waits=engine.num_mailbox_waits - before.num_mailbox_waits,
        num_on_demand_fetches=engine.num_on_demand_fetches - before.num_on_demand_fetches,
        num_slow_device_calls=engine.num_slow_device_calls - before.num_slow_device_calls,
        device_peak_bytes=engine.device_peak_bytes,
        registered_bytes=statistics_now.registration.registered_bytes,
        registration_s=statistics_now.registration.seconds,
    )


def _options(
    *,
    image_px: Sequence[int],
    source: Sequence[str],
    transfer: Sequence[str],
    window: int,
    residents: int,
    rounds: int,
    packing_threads: int | None,
    chunk_mib: int | None,
    device: str | None,
    peers: bool,
    folder: Path,
) -> StepOptions:
    on_cuda = streamflow.OffloadConfig(device=device).torch_device().type == "cuda"
    return StepOptions(
        shape=FluxShape() if on_cuda else SMALL,
        dtype=torch.bfloat16 if on_cuda else torch.float32,
        image_px=tuple(image_px) or ((1024, 2048) if on_cuda else (256,)),
        sources=tuple(source) or ("module",),
        transfers=tuple(transfer) or ("direct", "staged"),
        window_blocks=window,
        resident_blocks=residents,
        num_rounds=rounds,
        steps_per_round=4,
        packing_threads=packing_threads,
        staging_chunk_bytes=streamflow.OffloadConfig().staging_chunk_bytes if chunk_mib is None else chunk_mib << 20,
        device=device,
        peers=peers,
        folder=folder,
    )


@click.command("step")
@click.option("--px", "image_px", type=click.IntRange(64), multiple=True, help="Picture size; repeat to sweep.")
@click.option("--source", type=click.Choice(SOURCES), multiple=True, help="Repeat to sweep.  [default: module]")
@click.option("--transfer", type=click.Choice(["direct", "staged"]), multiple=True, help="Repeat to sweep.")
@click.option("--window", type=click.IntRange(1), default=2, show_default=True, help="Slots of the window.")
@click.option("--residents", type=click.IntRange(0), default=0, show_default=True, help="Blocks that stay.")
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Rounds of four steps each.")
@click.option("--packing-threads", type=click.IntRange(1), default=None, help="Threads of the staged transfer.")
@click.option("--chunk-mib", type=click.IntRange(1), default=None, help="Chunk of the staged transfer, in MiB.")
@click.option("--device", default=None, help="cuda, cuda:N or cpu; default: cuda where there is one.")
@click.option("--peers", is_flag=True, help="Also diffusers' group offload and accelerate's cpu_offload, if installed.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where files are made.  [default: of temporary files]")
@click.option("--json", "as_json", is_flag=True, help="Print the readings as one JSON object.")
def step(*, folder: Path | None, as_json: bool, **options: Any) -> None:
    """One step of a FLUX.1-shaped transformer: streamed against resident and the link limit, in one run.

    On CUDA the full size (23.7 GB of random bfloat16); on the CPU a small one in float32. A checkpoint, and a store,
    take as much on disk each.
    """
    with tempfile.TemporaryDirectory(prefix="streamflow-bench-", dir=folder) as made, shown_progress():
        report = anyio.run(measure, _options(folder=Path(made), **options))
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not all(reading["equal"] for reading in report["readings"]):
        raise click.exceptions.Exit(1)


def _print(report: dict[str, Any]) -> None:
    title = f"one step, link {report['link_bytes_per_s'] / 1e9:.1f} GB/s"
    columns = ("", "px", "x link limit", "x resident", "step", "resident", "hooks/block", "peak", "equal")
    table = plain_table(*columns, title=title)
    for reading in report["readings"]:
        table.add_row(
            f"{reading['transfer']} from {reading['source']}",
            str(reading["image_px"]),
            f"{reading['ratio_to_link_limit']:.3f}",
            f"{reading['ratio_to_resident']:.3f}",
            f"{reading['streamed_s'] * 1e3:.1f} ms",
            f"{reading['resident_s'] * 1e3:.1f} ms",
            f"{reading['hooks_cpu_us_per_block']:.0f} us",
            f"{reading['device_peak_bytes'] / 1e9:.2f} GB",
            "yes" if reading["equal"] else "NO",
        )
    for peer in report["peers"]:
        table.add_row(*_peer_cells(peer))
    result_console().print(table)


def _peer_cells(peer: dict[str, Any]) -> list[str]:
    if peer["problem"] is not None:
        return [f"{peer['peer']}: {peer['problem']}", str(peer["image_px"])]
    peak = peer["device_peak_bytes"]
    return [
        f"{peer['peer']} {peer['version']}",
        str(peer["image_px"]),
        f"{peer['ratio_to_link_limit']:.3f}",
        f"{peer['ratio_to_resident']:.3f}",
        f"{peer['step_s'] * 1e3:.1f} ms",
        "",
        "",
        "" if peak is None else f"{peak / 1e9:.2f} GB",
        "yes" if peer["equal"] else "NO",
    ]
