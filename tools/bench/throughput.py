"""``streamflow bench throughput``: forwards per second against concurrency, streamed and resident, in one run.

Streamed together (requests share walks), streamed one by one (the link's time for each of them), resident one by one
and resident in as many threads. On the CPU link and computing are modelled, with one compute unit; on CUDA the model is
FLUX.1-shaped. In every mode of a case each request makes as many forwards.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import attrs
import click
import torch

import streamflow
from streamflow.hardware import make_device
from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.threads import open_threads
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.flux_shaped import SMALL, FluxShape, random_inputs, random_models
from streamflow.tools.bench.rates import link_rate
from streamflow.tools.bench.sleeping import SleepingModel
from streamflow.tools.bench.traffic import Generation, Lane, Model, Traffic, stay_resident, stream

#: Steps of the generations, in turn: requests are to differ in them.
STEPS = (3, 4, 5, 4)
#: Steps of each generation where sizes are mixed.
MIXED_STEPS = 4


@attrs.frozen
class Subject:
    """A model to stream, the same model to stay, and what limits them. ``link_bytes_per_s``: of the link, measured."""

    model: torch.nn.Module
    resident: Model
    device: Device | None
    config: streamflow.OffloadConfig
    link_bytes_per_s: float

    @property
    def torch_device(self) -> torch.device:
        return self.config.torch_device()


@attrs.frozen
class Case:
    """What is asked of both models: ``lanes`` of generations, side by side."""

    name: str
    lanes: tuple[tuple[Generation, ...], ...]

    @property
    def concurrency(self) -> int:
        return len(self.lanes)


@attrs.frozen
class Rate:
    """One measurement. ``equal``: every output is that of the resident model alone, byte by byte.

    ``passes_per_walk`` and ``to_link_limit`` (seconds per walk over the time that its bytes take on the link) are of
    streamed ones only. ``problem``: why there is no rate.
    """

    case: str
    mode: str
    concurrency: int
    forwards_per_s: float | None
    equal: bool
    passes_per_walk: float | None = None
    to_link_limit: float | None = None
    problem: str | None = None


@attrs.frozen
class Effort:
    """Forwards to time for each lane of a case, and what one measurement may take in seconds."""

    forwards_per_lane: int
    limit_s: float


async def measure_case(
    subject: Subject, offload: streamflow.Offload, case: Case, effort: Effort, expected: dict[str, str]
) -> AsyncIterator[Rate]:
    """The case in every mode; ``expected`` gathers the digests of the resident model's outputs, made one by one."""
    one_lane = (tuple(generation for lane in case.lanes for generation in lane),)
    keep = partial(stay_resident, subject.resident, device=subject.torch_device)
    flow = partial(stream, offload, subject.model)
    modes: list[tuple[str, Callable[..., Any], Sequence[Sequence[Generation]]]] = [
        ("resident, one by one", keep, one_lane),
        ("streamed, one by one", flow, one_lane),
    ]
    if case.concurrency > 1:
        modes += [("resident, threads", keep, case.lanes), ("streamed, together", flow, case.lanes)]
    for mode, run, lanes in modes:
        yield await _measure(subject, offload, case, mode, run, lanes, effort, expected)


async def _measure(
    subject: Subject,
    offload: streamflow.Offload,
    case: Case,
    mode: str,
    run: Callable[..., Any],
    lanes: Sequence[Sequence[Generation]],
    effort: Effort,
    expected: dict[str, str],
) -> Rate:
    # each generation at least once, and as often as the others of its lane
    steps = max(sum(generation.num_steps for generation in lane) for lane in lanes)
    traffic = Traffic(len(lanes), max(effort.forwards_per_lane, steps), effort.limit_s)
    before = offload.statistics().engine
    try:
        with anyio.fail_after(effort.limit_s):
            await run(traffic=traffic, lanes=[Lane(generations) for generations in lanes])
    except TimeoutError:
        return Rate(case.name, mode, len(lanes), None, False, problem=f"not done within {effort.limit_s:g} s")
    for name, digests in traffic.digests.items():
        expected.setdefault(name, min(digests))
    equal = all(digests == {expected[name]} for name, digests in traffic.digests.items())
    rate = Rate(case.name, mode, len(lanes), traffic.forwards_per_s, equal)
    after = offload.statistics().engine
    num_walks, num_passes = after.num_walks - before.num_walks, after.num_passes - before.num_passes
    if not num_walks:
        return rate
    link_s = (after.streamed_bytes - before.streamed_bytes) / num_walks / subject.link_bytes_per_s
    passes_per_walk = num_passes / num_walks
    walk_s = passes_per_walk / traffic.forwards_per_s
    return attrs.evolve(rate, passes_per_walk=passes_per_walk, to_link_limit=walk_s / link_s)


def ratios(rates: Sequence[Rate]) -> dict[str, float]:
    """What matters: streamed rates over the better resident one of the same case, and walks over the link's time."""
    found: dict[str, float] = {}
    for case in dict.fromkeys(rate.case for rate in rates):
        here = {rate.mode: rate for rate in rates if rate.case == case}
        known = [r.forwards_per_s for m, r in here.items() if m.startswith("resident") and r.forwards_per_s is not None]
        for mode, rate in here.items():
            if mode.startswith("streamed") and rate.forwards_per_s is not None and known:
                found[f"{case}: {mode}, to resident"] = rate.forwards_per_s / max(known)
            if rate.to_link_limit is not None:
                found[f"{case}: {mode}, walk to link limit"] = rate.to_link_limit
    return found


# The two subjects


@asynccontextmanager
async def open_modelled(
    concurrency: Sequence[int], block_s: float, num_blocks: int, transfer_to_compute: float
) -> AsyncIterator[tuple[Subject, list[Case]]]:
    """A model that sleeps, on a modelled link; transfers take ``transfer_to_compute`` times as long as computing."""
    nbytes = 1 << 20
    link = nbytes / (block_s * transfer_to_compute)
    config = streamflow.OffloadConfig(device="cpu", max_running_requests=max(concurrency))
    device = CpuDevice(link_bytes_per_s=link, compute_units=1)
    model = SleepingModel(num_blocks, nbytes, block_s)
    resident = SleepingModel(num_blocks, nbytes, block_s, threading.Semaphore(1))
    cases = [
        Case(
            f"{count} requests",
            tuple((Generation(f"prompt {i}", STEPS[i % 4], torch.full((64,), float(i))),) for i in range(count)),
        )
        for count in concurrency
    ]
    yield Subject(model, resident, device, config, link), cases


@asynccontextmanager
async def open_flux_shaped(
    concurrency: Sequence[int], image_px: int, mixed_px: Sequence[int], device: str | None
) -> AsyncIterator[tuple[Subject, list[Case]]]:
    """The full size in random bfloat16 on CUDA, else a small one. ``mixed_px``: a case of its own in which each lane
    has another size.
    """
    config = streamflow.OffloadConfig(device=device, max_running_requests=max(*concurrency, len(mixed_px)))
    where = config.torch_device()
    on_cuda = where.type == "cuda"
    shape, dtype, num_text = (FluxShape(), torch.bfloat16, 512) if on_cuda else (SMALL, torch.float32, 16)

    def generation(name: str, px: int, index: int, num_steps: int) -> Generation:
        latents, *conditions = random_inputs(shape, px, num_text, dtype, where, seed=1 + index)
        return Generation(name, num_steps, latents, tuple(conditions))

    async with open_threads() as crew:
        backend = make_device(config)
        await backend.open(crew)
        copy_bytes = (1 << 30) if on_cuda else (16 << 20)
        copies = backend.open_copy_stream("link rate")
        link = await crew.call(partial(link_rate, backend, copies, copy_bytes), name="link rate")
        resident, model = await crew.call(lambda: random_models(shape, dtype, where), name="models")
        backend.close()
    cases = [
        Case(
            f"{count} x {image_px} px",
            tuple((generation(f"{image_px} px {i}", image_px, i, STEPS[i % 4]),) for i in range(count)),
        )
        for count in concurrency
    ]
    if mixed_px:
        # all in the same number of steps, so that one by one each size has its share
        lanes = tuple((generation(f"mixed {px} px {i}", px, i, MIXED_STEPS),) for i, px in enumerate(mixed_px))
        cases.append(Case(" + ".join(map(str, mixed_px)) + " px", lanes))
    yield Subject(model, resident, None, config, link), cases


#: A subject and the cases to measure it in, for as long as it is open.
Opened = AbstractAsyncContextManager[tuple[Subject, list[Case]]]


async def measure(opened: Opened, effort: Effort, tell: Callable[[Rate], object] | None = None) -> dict[str, Any]:
    """All rates of the subject and cases that ``opened`` gives; each is told when it is known."""
    rates: list[Rate] = []
    expected: dict[str, str] = {}
    async with (
        opened as (subject, cases),
        streamflow.open_offload(subject.model, subject.config, device=subject.device) as offload,
    ):
        for case in cases:
            async for rate in measure_case(subject, offload, case, effort, expected):
                rates.append(rate)
                if tell is not None:
                    tell(rate)
        peak = offload.statistics().engine.device_peak_bytes
    return {
        "benchmark": "throughput",
        "ratios": ratios(rates),
        "environment": environment(subject.torch_device),
        "link_bytes_per_s": subject.link_bytes_per_s,
        "device_peak_bytes": peak,
        "rates": [attrs.asdict(rate) for rate in rates],
    }


@click.command("throughput")
@click.option("--concurrency", type=click.IntRange(1), multiple=True, help="Repeat to sweep; default: 1, 2 and 4.")
@click.option("--px", "image_px", type=click.IntRange(64), default=1024, show_default=True, help="Picture size (CUDA).")
@click.option(
    "--mixed-px", default="512,1024,1536", show_default=True, help="Sizes that run together (CUDA); '': none."
)
@click.option("--forwards", type=click.IntRange(2), default=8, show_default=True, help="To time, for each request.")
@click.option(
    "--limit", "limit_s", type=click.FloatRange(1), default=40.0, show_default=True, help="Seconds for each rate."
)
@click.option("--device", default=None, help="cuda, cuda:N or cpu; default: cuda where there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print the readings as one JSON object.")
def throughput(
    *,
    concurrency: Sequence[int],
    image_px: int,
    mixed_px: str,
    forwards: int,
    limit_s: float,
    device: str | None,
    as_json: bool,
) -> None:
    """Forwards per second against concurrency: streamed together and one by one, resident, in one run.

    On CUDA a FLUX.1-shaped transformer (23.7 GB of random bfloat16, twice: it must also fit as a whole); on the CPU a
    modelled link, whose transfers take 2.5 times as long as the computing, and one compute unit.
    """
    counts = tuple(concurrency) or (1, 2, 4)
    on_cuda = streamflow.OffloadConfig(device=device).torch_device().type == "cuda"
    sizes = [int(px) for px in mixed_px.split(",") if px.strip()]
    opened = (
        open_flux_shaped(counts, image_px, sizes, device)
        if on_cuda
        else open_modelled(counts, block_s=0.03, num_blocks=8, transfer_to_compute=2.5)
    )
    report = anyio.run(measure, opened, Effort(forwards, limit_s), None if as_json else _print_rate)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print_ratios(report)
    if not all(rate["equal"] for rate in report["rates"]):
        raise click.exceptions.Exit(1)


def _print_rate(rate: Rate) -> None:
    known = rate.problem or f"{rate.forwards_per_s:.2f} forwards/s"
    walks = "" if rate.passes_per_walk is None else f", {rate.passes_per_walk:.2f} passes a walk"
    click.echo(f"{rate.case}, {rate.mode}: {known}{walks}{'' if rate.equal else ', NOT EQUAL'}")


def _print_ratios(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"link {report['link_bytes_per_s'] / 1e9:.3g} GB/s")
    table.add_column("ratio")
    table.add_column("", justify="right")
    for name, ratio in report["ratios"].items():
        table.add_row(name, f"{ratio:.3f}")
    Console().print(table)
