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

import streamflow
from streamflow.tools.bench.process_memory import mapping_kinds, proportional_bytes
from streamflow.tools.bench.stored_model import Model, an_input


def _tell(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def replica(checkpoint: Path, root: str, num_blocks: int) -> None:
    """Open, stream twice, tell; stay until told to end."""
    torch.set_num_threads(1)
    with torch.no_grad():
        Model(1)(an_input())  # what computing takes by itself belongs to the baseline
    await anyio.to_thread.run_sync(sys.stdin.readline)
    baseline = proportional_bytes()
    config = {"device": "cpu", "store_mode": "preferred", "store": {"root": root}}
    async with streamflow.open_streamed(lambda: Model(num_blocks), checkpoint, config) as (offload, model):
        with torch.no_grad():
            outputs = [await offload.run(model, an_input()) for _ in range(2)]
        statistics = offload.statistics()
        engine = statistics.engine
        _tell(
            digest=hashlib.sha256(b"".join(output.numpy(force=True).tobytes() for output in outputs)).hexdigest(),
            outcome=statistics.store and statistics.store.outcome,
            own_bytes=engine.window_bytes + engine.staging_bytes + statistics.fixed_bytes,
        )
        await anyio.to_thread.run_sync(sys.stdin.readline)
        _tell(pss=proportional_bytes(), baseline=baseline, mapping=mapping_kinds("weights-"))
        await anyio.to_thread.run_sync(sys.stdin.readline)


if __name__ == "__main__":
    anyio.run(replica, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
