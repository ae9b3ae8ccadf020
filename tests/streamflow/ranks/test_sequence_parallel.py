"""Ranks that share each request: their models meet in collectives of their own, in every block."""

from __future__ import annotations

import anyio
import torch
import torch.distributed as dist
from torch import nn

from streamflow.ranks.topology import RankGroups
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.kit import aligned_reference, in_worker, sha256_of
from tests.streamflow.ranks.joint import (
    WIDTH,
    Block,
    Member,
    Outcome,
    Seen,
    assert_nothing_left,
    backend_of,
    joined,
    opened,
    outcome_of,
    there,
)

SIZE, STEPS, TOKENS = 2, 3, 6


class Attending(nn.Module):
    """Each rank has a part of the tokens; every block looks at the sum over all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.transformer_blocks = nn.ModuleList(Block(size) for size in (96, 8, 33, 64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            total = tokens.sum(0)
            dist.all_reduce(total)
            tokens = block(tokens + total / TOKENS)
        return tokens


def part_of(rank: int, seed: int) -> torch.Tensor:
    whole = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return whole.chunk(SIZE)[rank].clone()


@torch.no_grad()
def generate(model: nn.Module, tokens: torch.Tensor) -> str:
    for _ in range(STEPS):
        tokens = model(tokens) / 2
    return sha256_of(tokens)


@torch.no_grad()
def generate_alone(seed: int) -> list[str]:
    """What each rank has in the end, computed by one model with all parts."""
    blocks = aligned_reference(Attending()).transformer_blocks
    parts = [part_of(rank, seed) for rank in range(SIZE)]
    for _ in range(STEPS):
        for block in blocks:
            total = parts[0].sum(0) + parts[1].sum(0)
            parts = [block(part + total / TOKENS) for part in parts]
        parts = [part / 2 for part in parts]
    return [sha256_of(part) for part in parts]


def test_no_wave_begins_before_every_rank_has_the_request() -> None:
    """The early rank's model would stand in its collective while the late one only feeds."""
    wave = WaveSignature((("Attending", STEPS),))

    async def scenario(member: Member) -> tuple[list[Outcome], int, Seen]:
        rank, outcomes, num_walks_before = member.rank, [], 0

        async def ask(seed: int) -> Outcome:
            request = member.offload.request(wave=wave)
            return await outcome_of(request.run(generate, member.model, part_of(rank.rank, seed)))

        async def look() -> None:
            nonlocal num_walks_before
            await anyio.sleep(0.5)  # ten times the window: every other wave would have begun
            num_walks_before = member.seen().num_walks
            member.announce("looked")

        async with anyio.create_task_group() as tasks:
            if rank.rank == 0:
                tasks.start_soon(look)
            else:
                await there(rank, "looked")
            outcomes.append(await ask(1))
        outcomes.append(await ask(2))
        await member.meet("done")
        return outcomes, num_walks_before, member.seen()

    def work(rank: Rank) -> object:
        before = joined(rank)

        async def main() -> object:
            groups = RankGroups(sequence_parallel=dist.group.WORLD)
            changes = {"max_running_requests": 1, "ranks": {"wave_window_s": 0.05}}
            async with opened(rank, Attending(), groups=groups, **changes) as member:
                return await scenario(member)

        result = anyio.run(main, backend=backend_of(rank))
        assert_nothing_left(before)
        return result

    answers = run_ranks(SIZE, work)
    expected = [in_worker(lambda seed=seed: generate_alone(seed)) for seed in (1, 2)]
    for rank, (outcomes, num_walks_before, seen) in enumerate(answers):
        assert num_walks_before == 0
        assert [outcome.value for outcome in outcomes] == [digests[rank] for digests in expected], outcomes
        assert (seen.transfer, seen.num_walks, seen.num_passes) == ("gathered", 2 * STEPS, 2 * STEPS)
