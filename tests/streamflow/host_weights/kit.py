"""Opening models through a store of one test, and what its entries consist of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
from torch import nn

import streamflow
from streamflow import Offload, OffloadConfig
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.store.options import StoreOptions
from streamflow.store.reports import StoreReport
from tests.streamflow.kit import check_statistics, compare, resident_digests, save_checkpoint, streamflow_threads
from tests.streamflow.models import CALLS, Case, mlp_stack

CASE = Case("mlp", lambda: mlp_stack(6), CALLS)
Load = Callable[[nn.Module], nn.Module]


class Calls:
    """Counts what a loader was asked for."""

    def __init__(self) -> None:
        self.num_loads = 0
        self.num_builds = 0


@attrs.frozen
class Stored:
    """A checkpoint and a store, both in the test's own folder."""

    folder: Path
    case: Case = CASE
    calls: Calls = attrs.field(factory=Calls)
    store_name: str = "store"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def root(self) -> Path:
        return self.folder / self.store_name

    def save(self, **options: Any) -> None:
        """Write the model's checkpoint."""
        self.checkpoint.mkdir(exist_ok=True)
        save_checkpoint(self.case.build(), self.checkpoint, **options)

    def config(self, mode: str, **options: Any) -> OffloadConfig:
        """A configuration with the store on."""
        store = {"root": str(self.root), "free_space_headroom_bytes": 0, "free_space_headroom_fraction": 0.0}
        store |= options.pop("store", {})
        common = {"device": "cpu", "plan": self.case.plan, "poison_freed_slots": True}
        return OffloadConfig(store_mode=mode, store=StoreOptions(**store), **{**common, **options})

    def build(self) -> nn.Module:
        """What `open_streamed` builds skeletons with."""
        self.calls.num_builds += 1
        return self.case.build()

    def load(self, skeleton: nn.Module) -> nn.Module:
        """An ordinary loader that counts."""
        self.calls.num_loads += 1
        return self.case.build()

    @property
    def entries(self) -> list[Path]:
        """The folders of all generations."""
        return sorted((self.root / "entries").glob("*/*"))

    @property
    def weight_files(self) -> list[Path]:
        return sorted(file for entry in self.entries for file in entry.glob("*.safetensors"))

    @asynccontextmanager
    async def streamed(
        self,
        mode: str,
        *,
        load: bool = False,
        inputs: LoadInputs | None = None,
        finalize: Callable[[nn.Module], object] | None = None,
        device: CpuDevice | None = None,
        **options: Any,
    ) -> AsyncIterator[tuple[Offload, nn.Module]]:
        """The model, streamed through the store; ``load``: by a loader of its own."""
        if (load or finalize is not None) and inputs is None:
            inputs = LoadInputs(producer_abi="test 1")
        async with streamflow.open_streamed(
            self.build,
            self.checkpoint,
            self.config(mode, **options),
            load=self.load if load else None,
            finalize=finalize,
            inputs=inputs,
            device=device,
        ) as streamed:
            yield streamed

    async def stream_and_compare(self, mode: str, **options: Any) -> StoreReport:
        """Stream it, fail unless it is exact and small, and return what the store did."""
        expected = resident_digests(self.case.build(), self.case.calls)
        device, threads = CpuDevice(), streamflow_threads()
        async with self.streamed(mode, device=device, **options) as (offload, model):
            await compare(offload, model, self.case.calls, expected)
            statistics = offload.statistics()
        check_statistics(statistics, streams=self.case.streams)
        assert device.memory().in_use == 0
        assert streamflow_threads() == threads
        assert statistics.store is not None
        return statistics.store


def report_of(offload: Offload) -> StoreReport:
    """What the store did for an open offload."""
    report = offload.statistics().store
    assert report is not None
    return report


#: A topology for each code that a topology can be refused with.
REFUSED: Mapping[str, dict[str, Any]] = {
    "unsupported_hsdp": {"hsdp": True},
    "unsupported_expert_parallel": {"expert_parallel_size": 2},
    "unsupported_cfg_parallel": {"cfg_parallel_size": 2},
    "unsupported_pp": {"pipeline_parallel_size": 2},
    "unsupported_quantization": {"online_quantization": "fp8"},
    "parallel_rank_unavailable": {"tensor_parallel_size": 2},
}
