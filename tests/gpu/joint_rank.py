"""One rank of the tests on two GPUs, in a process of its own: ``python -m tests.gpu.joint_rank RANK SIZE STORE WHAT``.

It answers in lines of JSON on its standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import anyio
import torch
import torch.distributed as dist

import streamflow
from streamflow.stages.ranks.errors import RankError
from streamflow.stages.ranks.signature import WaveSignature
from tests.streamflow.kit import aligned_reference, sha256_of
from tests.streamflow.ranks.test_waves import Denoiser

STEPS = 6
#: Steps of a request that is ended from outside.
FOR_EVER = 1_000_000
RANK_DEADLINE_S = 5.0
OPTIONS: dict[str, Any] = {
    "ranks": {
        "gather": "always",
        "local_blocks": "none",
        "gather_chunk_bytes": 1 << 16,
        "rank_deadline_s": RANK_DEADLINE_S,
    }
}


def tell(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def model() -> Denoiser:
    return Denoiser(hidden=(1600, 320, 333, 1600, 77), width=256).eval().requires_grad_(False)


def denoise(denoiser: Any, rank: int, steps: int, device: torch.device, on_step: Any = None) -> torch.Tensor:
    """What ``rank`` makes of its own picture."""
    latents = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank)).to(device)
    with torch.no_grad():
        for step in range(steps):
            latents = denoiser(latents) / 2
            if on_step is not None and step % 50 == 10:
                torch.cuda.current_stream(device).synchronize()
                on_step(step)
    return latents


async def wave(rank: int, device: torch.device, groups: streamflow.RankGroups) -> None:
    """Every rank's own picture is what its resident model makes."""
    expected = await anyio.to_thread.run_sync(
        lambda: denoise(aligned_reference(model()).to(device), rank, STEPS, device).cpu()
    )
    streamed = model()
    async with streamflow.open_offload(streamed, {"device": str(device), **OPTIONS}, ranks=groups) as offload:
        request = offload.request(wave=WaveSignature((("Denoiser", STEPS),)))
        found = (await request.run(denoise, streamed, rank, STEPS, device)).cpu()
        statistics = offload.statistics()
    tell(
        equal=sha256_of(found) == sha256_of(expected),
        digest=sha256_of(found),
        transfer=statistics.choice.transfer,
        num_walks=statistics.engine.num_walks,
        streamed_bytes=statistics.engine.streamed_bytes,
        peak_bytes=statistics.engine.device_peak_bytes,
        model_bytes=statistics.model_bytes,
    )


async def killed(rank: int, device: torch.device, groups: streamflow.RankGroups) -> None:
    """A request that goes on until a rank is gone."""
    streamed = model()
    async with streamflow.open_offload(streamed, {"device": str(device), **OPTIONS}, ranks=groups) as offload:
        request = offload.request(wave=WaveSignature((("Denoiser", FOR_EVER),)))
        try:
            await request.run(denoise, streamed, rank, FOR_EVER, device, lambda step: tell(step=step))
        except streamflow.StreamflowError as failure:
            cause = failure if isinstance(failure, RankError) else failure.__cause__
            named = cause.rank if isinstance(cause, RankError) else None
            tell(error=type(failure).__name__, cause=repr(cause), rank=named, at=time.time(), state=offload.state)
    tell(closed_at=time.time())


def main(rank: int, size: int, store: str, what: str) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    groups = streamflow.RankGroups(data_parallel=dist.group.WORLD)
    anyio.run({"wave": wave, "killed": killed}[what], rank, torch.device("cuda", rank), groups)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
