"""One replica of ``streamflow bench memory``: opens a model through a store, streams, and tells what memory it has.

Speaks JSON lines: asked by a line on standard input, it goes on; it ends when standard input does.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import nn

import streamflow
from streamflow.tools.bench.process_memory import mapping_kinds, proportional_bytes
from streamflow.tools.bench.stored_model import Model, an_input, is_host


def _tell(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def replica(checkpoint: Path, root: str, num_blocks: int, device: str) -> None:
    """Open, stream twice, tell; close, tell; stay until told to end."""
    torch.set_num_threads(1)
    await _warm_up(device)
    _tell(is_ready=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)
    baseline = proportional_bytes()
    config = streamflow.OffloadConfig(device=device, store_mode="preferred", store=streamflow.StoreOptions(root=root))
    async with streamflow.open_streamed(lambda: Model(num_blocks), checkpoint, config) as (offload, model):
        outputs = [await _run(offload, model) for _ in range(2)]
        statistics = offload.statistics()
        _tell(
            digest=hashlib.sha256(b"".join(output.numpy(force=True).tobytes() for output in outputs)).hexdigest(),
            outcome=statistics.store and statistics.store.outcome,
            transfer=statistics.choice.transfer,
            registered_bytes=statistics.registration.registered_bytes,
            own_bytes=_own_host_bytes(statistics),
        )
        await anyio.to_thread.run_sync(sys.stdin.readline)
        _tell(pss=proportional_bytes(), baseline=baseline, mapping=mapping_kinds("weights-"))
        await anyio.to_thread.run_sync(sys.stdin.readline)
    _tell(left=mapping_kinds("weights-"))
    await anyio.to_thread.run_sync(sys.stdin.readline)


async def _warm_up(device: str) -> None:
    """What computing takes by itself belongs to the baseline, and so does what a device's driver keeps for itself."""
    with torch.no_grad():
        Model(1)(an_input())
    if not is_host(device):
        small = Model(2)
        async with streamflow.open_offload(small, {"device": device}) as offload:
            await _run(offload, small)


async def _run(offload: streamflow.Offload, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = await offload.run(model, an_input().to(offload.config.torch_device()))
        return result


def _own_host_bytes(statistics: streamflow.OffloadStatistics) -> int:
    """What each process has on the host for itself. On an accelerator, window and fixed tensors are not there."""
    engine = statistics.engine
    on_device = engine.window_bytes + statistics.fixed_bytes
    return engine.staging_bytes + (on_device if is_host(statistics.device) else 0)


if __name__ == "__main__":
    anyio.run(replica, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
