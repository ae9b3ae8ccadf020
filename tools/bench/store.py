"""``streamflow bench store``: publishing against copying and hashing, and a hit against ordinary loading.

All in one run and in rounds, one after the other, so that a machine that is busy is so for everything.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import attrs
import click
from torch import nn

import streamflow
from streamflow.config import OffloadConfig
from streamflow.hardware import Hardware
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.ownership import ownership_of
from streamflow.host_weights.producer import draft_of_checkpoint
from streamflow.host_weights.sharing import metadata_of
from streamflow.model_request import ModelRequest
from streamflow.opening import inventory_of
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.progress import tracked
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.store.draft import Draft
from streamflow.store.options import StoreOptions
from streamflow.store.source_digests import SETTLE_S
from streamflow.store.store import open_store
from streamflow.tools.bench.stored_model import Model, num_blocks_of, save_model
from streamflow.tools.terminal import (
    fact_table,
    format_bytes,
    format_seconds,
    print_json,
    result_console,
    shown_progress,
)
from streamflow.weights.checkpoint import Checkpoint, open_checkpoint
from streamflow.weights.checkpoint_plan import CheckpointFallback, CheckpointPlan, FallbackCode

#: What is hashed to learn the rate of one core, in pieces that stay in its cache.
_HASHED_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20


@attrs.frozen
class StoreReading:
    """Medians of all rounds, in seconds but for the sizes and the rate.

    ``publish_s`` may be ``publish_limit_s``: the larger of 1.5 times ``copy_s`` (cp and sync) and the bytes over 0.8 x
    cores x the rate at which one core hashes. ``hit_s``, from the skeleton to an offload that streams, may be
    ``hit_limit_s``: 2 % of ``load_s``, which is from a skeleton to a loaded model, and 50 ms.
    """

    num_cores: int
    num_rounds: int
    nbytes: int
    sha256_bytes_per_s: float
    copy_s: float
    publish_s: float
    load_s: float
    hit_s: float

    @property
    def publish_limit_s(self) -> float:
        hashing_s = self.nbytes / (0.8 * self.num_cores * self.sha256_bytes_per_s)
        return max(1.5 * self.copy_s, hashing_s)

    @property
    def hit_limit_s(self) -> float:
        return 0.02 * self.load_s + 0.05

    def as_dict(self) -> dict[str, object]:
        """Everything, with the limits and whether they are met."""
        return {
            **attrs.asdict(self),
            "publish_limit_s": self.publish_limit_s,
            "publish_ratio": self.publish_s / self.publish_limit_s,
            "hit_limit_s": self.hit_limit_s,
            "hit_ratio": self.hit_s / self.hit_limit_s,
            "is_met": self.publish_s <= self.publish_limit_s and self.hit_s <= self.hit_limit_s,
        }


@attrs.frozen
class _Subject:
    """A model's checkpoint in ``folder``, and how it is opened through the store there."""

    folder: Path
    num_blocks: int

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def options(self, name: str) -> StoreOptions:
        return StoreOptions(root=str(self.folder / name), free_space_headroom_bytes=0, free_space_headroom_fraction=0.0)

    def config(self) -> OffloadConfig:
        return OffloadConfig(device="cpu", store_mode="preferred", store=self.options("store"))

    def build(self) -> nn.Module:
        return Model(self.num_blocks)

    def request(self) -> ModelRequest:
        return ModelRequest(
            build=self.build,
            checkpoint_dir=self.checkpoint,
            config=self.config(),
            load=None,
            finalize=None,
            adapters=(),
            inputs=LoadInputs(),
            hardware=Hardware(CpuDevice()),
        )


async def measure_store(folder: Path, nbytes: int, num_rounds: int) -> StoreReading:
    """Make a model of about ``nbytes`` and its checkpoint in ``folder``, and measure in so many rounds."""
    subject = _Subject(folder, num_blocks_of(nbytes))
    saved_bytes = await anyio.to_thread.run_sync(save_model, subject.checkpoint, subject.num_blocks)
    await anyio.sleep(SETTLE_S + 0.1)  # a source's digest is remembered once its times are past doubt
    await _time_opening(subject)
    rates, copies, publications, loads, hits = [], [], [], [], []
    async with open_threads() as crew:
        for number in tracked("measuring", range(num_rounds)):
            rates.append(await crew.call(_hash_rate))
            copies.append(await crew.call(lambda: _time_copy(subject)))
            publications.append(await _time_publication(subject, crew, f"published-{number}"))
            loads.append(await crew.call(lambda: _time_loading(subject)))
            hits.append(await _time_opening(subject))
    return StoreReading(
        num_cores=len(os.sched_getaffinity(0)),
        num_rounds=num_rounds,
        nbytes=saved_bytes,
        sha256_bytes_per_s=statistics.median(rates),
        copy_s=statistics.median(copies),
        publish_s=statistics.median(publications),
        load_s=statistics.median(loads),
        hit_s=statistics.median(hits),
    )


def _hash_rate() -> float:
    piece, digest = bytes(_PIECE_BYTES), hashlib.sha256()

    def work() -> None:
        for _ in range(_HASHED_BYTES // _PIECE_BYTES):
            digest.update(piece)

    return _HASHED_BYTES / _seconds(work)


def _time_copy(subject: _Subject) -> float:
    """Copy the checkpoint's file and bring it to the disk, with the system's own programs."""
    source, target = subject.checkpoint / "model.safetensors", subject.folder / "copy"

    def work() -> None:
        subprocess.run(["cp", "--", str(source), str(target)], check=True)
        subprocess.run(["sync", "--", str(target)], check=True)

    try:
        return _seconds(work)
    finally:
        target.unlink(missing_ok=True)


async def _time_publication(subject: _Subject, crew: ThreadCrew, name: str) -> float:
    """Publish what the checkpoint holds into a store that has nothing."""
    checkpoint = await crew.call(lambda: open_checkpoint(subject.checkpoint), undo=Checkpoint.close)
    try:
        draft = await crew.call(lambda: _draft(subject, checkpoint))
        async with open_store(subject.options(name), crew) as store:
            began = time.perf_counter()
            await store.publish(draft, source_id=None)
            return time.perf_counter() - began
    finally:
        checkpoint.close()
        await crew.call_through(lambda: shutil.rmtree(subject.folder / name))


def _draft(subject: _Subject, checkpoint: Checkpoint) -> Draft:
    request = subject.request()
    skeleton, plan = request.finished_skeleton(request.build_skeleton(), checkpoint)
    if not isinstance(plan, CheckpointPlan):
        raise TypeError(f"the benchmark's own checkpoint cannot be streamed: {plan.reason}")  # pragma: no cover
    inventory = inventory_of(skeleton, request.config)
    return draft_of_checkpoint(
        ownership_of(skeleton, inventory), inventory, checkpoint, plan, metadata_of(skeleton, None)
    )


def _time_loading(subject: _Subject) -> float:
    """Load the model the ordinary way, into private memory."""
    request = subject.request()
    skeleton = request.build_skeleton()
    asked = CheckpointFallback(FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE, "asked for", ())
    checkpoint = open_checkpoint(subject.checkpoint)
    try:
        return _seconds(lambda: request.load_finished(skeleton, checkpoint, asked))
    finally:
        checkpoint.close()


async def _time_opening(subject: _Subject) -> float:
    """Open the model through the store: from the moment at which its skeleton is there."""
    built: list[float] = []

    def build() -> nn.Module:
        skeleton = subject.build()
        built.append(time.perf_counter())
        return skeleton

    async with streamflow.open_streamed(build, subject.checkpoint, subject.config()):
        return time.perf_counter() - built[-1]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@click.command("store")
@click.option("--size-mb", type=click.IntRange(min=32), default=2000, show_default=True, help="Size of the model.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds; medians are shown.")
@click.option("--json", "as_json", is_flag=True, help="Print the reading as one JSON object.")
def store(*, size_mb: int, rounds: int, as_json: bool) -> None:
    """Publishing into the host weight store against copying and hashing; a hit against ordinary loading.

    Needs three times the model's size on the disk of the temporary folder (TMPDIR).
    """
    with tempfile.TemporaryDirectory(prefix="streamflow-bench-") as folder, shown_progress():
        reading = anyio.run(measure_store, Path(folder), size_mb * 1_000_000, rounds)
    if as_json:
        print_json({"benchmark": "store", **reading.as_dict()})
        return
    table = fact_table()
    table.add_row("model", f"{format_bytes(reading.nbytes)}, {reading.num_cores} cores, {reading.num_rounds} rounds")
    table.add_row("copying (cp, sync)", format_seconds(reading.copy_s))
    table.add_row("one core hashes", f"{format_bytes(int(reading.sha256_bytes_per_s))}/s")
    table.add_row("publishing", f"{format_seconds(reading.publish_s)} of {format_seconds(reading.publish_limit_s)}")
    table.add_row("ordinary loading", format_seconds(reading.load_s))
    table.add_row("a hit", f"{format_seconds(reading.hit_s)} of {format_seconds(reading.hit_limit_s)}")
    result_console().print(table)
