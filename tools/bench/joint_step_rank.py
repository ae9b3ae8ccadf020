"""One rank of ``streamflow bench step --ranks``: under torchrun, or a process that the benchmark started.

Each rank has a picture of its own. All are measured at once: their link, their resident model, and steps of the
streamed one, for every way of streaming; a reading is that of the slowest rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import attrs
import torch
import torch.distributed as dist

import streamflow
from streamflow.hardware import make_device
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.threads import open_threads
from streamflow.tools.bench.children import answer
from streamflow.tools.bench.clock import timed_steps
from streamflow.tools.bench.digests import digest_of
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.flux_shaped import FluxShape, FluxShaped, random_inputs, random_models
from streamflow.tools.bench.process_memory import private_bytes, proportional_bytes
from streamflow.tools.bench.rank_processes import RankPlace, join_ranks
from streamflow.tools.bench.rates import link_rate

NUM_TEXT_TOKENS = 512
#: How long ranks wait for each other between readings; the first of them loads and publishes.
PATIENCE_S = 400.0


@attrs.frozen
class JointStepQuestion:
    """What the ranks are to measure: ``chunk_bytes`` of the gather are swept, after whole blocks for each rank.

    ``shared``: "store" for an entry of the host weight store in a temporary folder under ``folder``, "module" for the
    one host copy of ranks that loaded the model themselves.
    """

    device: str
    shape: dict[str, int]
    image_px: int
    shared: str
    chunk_bytes: Sequence[int]
    window_blocks: int
    num_rounds: int
    steps_per_round: int
    folder: str | None


@attrs.frozen
class JointReading:
    """One way of streaming: medians in seconds, of the slowest rank, over steps of all ranks at once.

    ``chunk_bytes`` None: each rank copied whole blocks. ``ratio_to_link_limit``: to the time in which one rank alone
    copies the same bytes over one link. ``private_bytes``: the most of a rank, beyond what it had before opening.
    """

    transfer: str
    chunk_bytes: int | None
    num_steps: int
    step_s: float
    link_limit_s: float
    resident_s: float
    ratio_to_link_limit: float
    ratio_to_resident: float
    num_walks_per_step: float
    device_peak_bytes: int
    private_bytes: int
    proportional_bytes: int
    mailbox_wait_s_per_step: float
    hooks_cpu_us_per_block: float
    num_slow_device_calls: int
    equal: bool


class JointStep:
    """The measurement of one rank; torch.distributed is initialised."""

    def __init__(self, question: JointStepQuestion, place: RankPlace) -> None:
        self.question, self._place = question, place
        self._device = torch.device("cuda", place.local_rank) if question.device == "cuda" else torch.device("cpu")
        self._dtype = torch.bfloat16 if question.device == "cuda" else torch.float32
        self._shape = FluxShape(**question.shape)

    async def measure(self, report: dict[str, Any], folder: str) -> None:
        """Fill ``report``; the same on all ranks but for what `environment` says."""
        report["environment"] = environment(self._device)
        alone, together = await self._link_rates()
        report["link_bytes_per_s"], report["links_together_bytes_per_s"] = alone, together
        resident, model = await anyio.to_thread.run_sync(random_models, self._shape, self._dtype, self._device)
        inputs = self._inputs()
        run = partial(timed_steps, num_steps=self.question.steps_per_round, device=self._device)
        times, expected = await anyio.to_thread.run_sync(run, lambda: resident(*inputs))
        times, expected = await anyio.to_thread.run_sync(run, lambda: resident(*inputs))
        digest, resident_s = digest_of(expected), max(await self.everyones(statistics.median(times)))
        report["digests"] = await self.everyones(digest)
        for chunk_bytes in (None, *self.question.chunk_bytes):
            way = _Way(self, model, inputs, min(alone), resident_s, digest, chunk_bytes, folder)
            report["readings"].append(attrs.asdict(await way.measure(run)))

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        seed = 1 + self._place.rank
        return random_inputs(self._shape, self.question.image_px, NUM_TEXT_TOKENS, self._dtype, self._device, seed=seed)

    async def _link_rates(self) -> tuple[list[float], list[float]]:
        """Each rank's rate of copies to its device: one rank after the other, and all at once."""
        device = make_device(streamflow.OffloadConfig(device=str(self._device)))
        copy_bytes = (1 << 30) if self.question.device == "cuda" else (16 << 20)
        async with open_threads() as crew:
            await device.open(crew)
            stream = device.open_copy_stream("link rate")
            measure = partial(link_rate, device, stream, copy_bytes)
            own = 0.0
            for rank in range(self._place.size):
                await self.everyones(None)
                if rank == self._place.rank:
                    own = await crew.call(measure, name="link rate")
            alone = await self.everyones(own)
            together = await self.everyones(await crew.call(measure, name="link rate"))
            device.close()
        return alone, together

    async def everyones(self, value: Any) -> list[Any]:
        """The value of every rank, by rank; all wait for each other."""

        def exchange() -> list[Any]:
            found: list[Any] = [None] * self._place.size
            dist.all_gather_object(found, value)
            return found

        return await anyio.to_thread.run_sync(exchange)

    def config(self, chunk_bytes: int | None, folder: str) -> streamflow.OffloadConfig:
        """The offload's options for one way of streaming."""
        question = self.question
        gather: dict[str, Any] = {"gather": "never"}
        if chunk_bytes is not None:
            gather = {"gather": "always", "gather_chunk_bytes": chunk_bytes, "local_blocks": "none"}
        store: dict[str, Any] = {}
        if question.shared == "store":
            root = os.path.join(folder, "store")
            headroom = {"free_space_headroom_bytes": 0, "free_space_headroom_fraction": 0.0}
            store = {"store_mode": "preferred", "store": {"root": root, "verification": "size", **headroom}}
        return streamflow.OffloadConfig(
            device=str(self._device),
            window_blocks=question.window_blocks,
            max_running_requests=1,
            ranks=streamflow.RankOptions(**gather, wave_window_s=0.05, rank_deadline_s=20.0),
            **store,
        )


@attrs.frozen(eq=False)
class _Way:
    """One way of streaming, measured by all ranks at once."""

    joint: JointStep
    model: FluxShaped
    inputs: tuple[torch.Tensor, ...]
    link: float
    resident_s: float
    digest: str
    chunk_bytes: int | None
    folder: str

    async def measure(self, run: Callable[..., tuple[list[float], torch.Tensor]]) -> JointReading:
        question, model, inputs = self.joint.question, self.model, self.inputs
        wave = WaveSignature(((type(model).__name__, question.steps_per_round),))
        before_bytes = private_bytes()
        groups = streamflow.RankGroups(data_parallel=dist.group.WORLD)
        config = self.joint.config(self.chunk_bytes, self.folder)
        async with streamflow.open_offload(model, config, ranks=groups) as offload:
            await offload.request(wave=wave).run(run, lambda: model(*inputs))  # kernels are chosen
            before, times = offload.statistics(), list[float]()
            for _ in range(question.num_rounds):
                await self.joint.everyones(None)
                seconds, found = await offload.request(wave=wave).run(run, lambda: model(*inputs))
                times += seconds
            own = self._own(before, offload.statistics(), times, digest_of(found) == self.digest, before_bytes)
        return self._of_all(await self.joint.everyones(own))

    def _own(
        self,
        before: streamflow.OffloadStatistics,
        now: streamflow.OffloadStatistics,
        times: list[float],
        equal: bool,
        before_bytes: int,
    ) -> dict[str, Any]:
        engine, earlier = now.engine, before.engine
        num_steps = engine.num_passes - earlier.num_passes
        limit_s = (engine.streamed_bytes - earlier.streamed_bytes) / num_steps / self.link
        num_blocks = max(1, engine.num_blocks_run - earlier.num_blocks_run)
        return {
            "transfer": now.choice.transfer,
            "num_steps": len(times),
            "step_s": statistics.median(times),
            "link_limit_s": limit_s,
            "num_walks_per_step": (engine.num_walks - earlier.num_walks) / num_steps,
            "device_peak_bytes": engine.device_peak_bytes,
            "private_bytes": max(0, private_bytes() - before_bytes),
            "proportional_bytes": proportional_bytes(),
            "mailbox_wait_s_per_step": (engine.mailbox_wait_s - earlier.mailbox_wait_s) / num_steps,
            "hooks_cpu_us_per_block": (engine.hooks_cpu_s - earlier.hooks_cpu_s) / num_blocks * 1e6,
            "num_slow_device_calls": engine.num_slow_device_calls - earlier.num_slow_device_calls,
            "equal": equal,
        }

    def _of_all(self, found: Sequence[dict[str, Any]]) -> JointReading:
        slowest = max(found, key=lambda own: own["step_s"])
        most = {
            name: max(own[name] for own in found)
            for name in ("device_peak_bytes", "private_bytes", "proportional_bytes")
        }
        return JointReading(
            **{
                **slowest,
                **most,
                "chunk_bytes": self.chunk_bytes,
                "resident_s": self.resident_s,
                "ratio_to_link_limit": slowest["step_s"] / slowest["link_limit_s"],
                "ratio_to_resident": slowest["step_s"] / self.resident_s,
                "equal": all(own["equal"] for own in found),
            }
        )


async def measure_rank(question: JointStepQuestion, place: RankPlace) -> dict[str, Any]:
    """The report, with a ``problem`` if the ranks could not go on."""
    report: dict[str, Any] = {
        "benchmark": "joint step",
        "ranks": place.size,
        "question": attrs.asdict(question, filter=lambda field, _: field.name != "folder"),
        "readings": [],
        "problem": None,
    }
    try:
        await anyio.to_thread.run_sync(_join, question, place)
        with _shared_folder(question, place) as folder:
            await JointStep(question, place).measure(report, folder)
    except (streamflow.StreamflowError, RuntimeError) as failure:  # torch.distributed's errors are of the latter kind
        report["problem"] = f"{type(failure).__name__}: {failure}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return report


def _join(question: JointStepQuestion, place: RankPlace) -> None:
    if question.device == "cuda":
        torch.cuda.set_device(place.local_rank)
    join_ranks(place, PATIENCE_S)


@contextmanager
def _shared_folder(question: JointStepQuestion, place: RankPlace) -> Iterator[str]:
    """A temporary folder that all ranks have; it goes when all have left."""
    with tempfile.TemporaryDirectory(prefix="streamflow-bench-", dir=question.folder) as made:
        names: list[Any] = [made]
        dist.broadcast_object_list(names, src=0)
        yield names[0]
        dist.barrier()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    answer(anyio.run(measure_rank, JointStepQuestion(**asked["question"]), RankPlace(**asked["place"])))
