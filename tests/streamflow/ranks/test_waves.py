"""Ranks in processes of their own, each with a request of its own, in one wave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import streamflow
from streamflow.ranks.topology import RankGroups
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.kit import aligned_reference, in_worker, sha256_of

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Denoiser(nn.Module):
    """Blocks of unequal sizes; what it makes of a prompt depends on every weight."""

    def __init__(self, hidden: tuple[int, ...] = (160, 32, 35, 160, 7), width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.transformer_blocks = nn.ModuleList(Block(width, size) for size in hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            x = block(x)
        return x


def denoise(model: Callable[[torch.Tensor], torch.Tensor], seed: int, steps: int) -> torch.Tensor:
    latents = torch.randn(2, 24, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for _ in range(steps):
            latents = model(latents) / 2
    return latents


def wave(steps: int = STEPS) -> WaveSignature:
    return WaveSignature((("Denoiser", steps),))


CONFIG: Mapping[str, Any] = {
    "device": "cpu",
    "ranks": {"gather": "always", "local_blocks": "none", "gather_chunk_bytes": 4096},
}


def open_joint(model: nn.Module, rank: Rank, **options: Any) -> Any:
    group = rank.join(timeout_s=20)
    return streamflow.open_offload(model, {**CONFIG, **options}, ranks=RankGroups(data_parallel=group))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_its_own_picture(size: int, backend: str) -> None:
    def work(rank: Rank) -> object:
        model = Denoiser()

        async def main() -> object:
            async with open_joint(model, rank) as offload:
                result = await offload.request(wave=wave()).run(lambda: denoise(model, rank.rank, STEPS))
                return sha256_of(result), attr(offload.statistics())

        def attr(statistics: Any) -> Any:
            return statistics.choice.transfer, statistics.engine.num_walks, statistics.engine.streamed_bytes

        return anyio.run(main, backend=backend)

    answers = run_ranks(size, work)
    expected = [
        in_worker(lambda seed=seed: sha256_of(denoise(aligned_reference(Denoiser()), seed, STEPS)))
        for seed in range(size)
    ]
    assert [digest for digest, _ in answers] == expected
    assert len(set(expected)) == size
    assert {transfer for _, (transfer, _, _) in answers} == {"gathered"}
    assert {num_walks for _, (_, num_walks, _) in answers} == {STEPS}
