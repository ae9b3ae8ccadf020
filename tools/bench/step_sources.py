"""The sources that ``streamflow bench step`` streams from: the loaded module, its checkpoint, its entry in a store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import attrs
import torch
from safetensors.torch import save_file
from torch import nn

import streamflow
from streamflow.tools.bench.flux_shaped import FluxShape, FluxShaped

SOURCES = ("module", "checkpoint", "store")


@attrs.frozen
class StepSource:
    """Where the blocks come from. ``folder`` holds the checkpoint, which is written on first use, and the store."""

    name: str
    shape: FluxShape
    dtype: torch.dtype
    folder: Path

    @asynccontextmanager
    async def opened(
        self, model: FluxShaped, config: streamflow.OffloadConfig
    ) -> AsyncIterator[tuple[streamflow.Offload, nn.Module]]:
        """An offload of ``model``, or of one with its weights, from this source."""
        if self.name == "module":
            async with streamflow.open_offload(model, config) as offload:
                yield offload, model
            return
        checkpoint = await anyio.to_thread.run_sync(partial(self._checkpoint, model))
        if self.name == "store":
            root = str(self.folder / "store")
            # the size only: checking digests meanwhile would take part in what is measured
            room: dict[str, Any] = {"free_space_headroom_bytes": 0, "free_space_headroom_fraction": 0.0}
            store = streamflow.StoreOptions(root=root, verification="size", **room)
            config = attrs.evolve(config, store_mode="preferred", store=store)
        async with streamflow.open_streamed(self._build, checkpoint, config) as streamed:
            yield streamed

    def _build(self) -> nn.Module:
        return FluxShaped(self.shape).to(self.dtype)

    def _checkpoint(self, model: FluxShaped) -> Path:
        path = self.folder / "checkpoint"
        if not path.exists():
            path.mkdir()
            save_file(model.state_dict(), path / "model.safetensors")
        return path
