"""Offloads that ranks cannot open together: each is told why, in time, by one kind of error, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.ranks.coordinator import Coordinator
from tests.ranks import Rank, forked_ranks
from tests.streamflow.ranks.joint import (
    RANK_DEADLINE_S,
    Denoiser,
    Outcome,
    assert_nothing_left,
    backend_of,
    failed,
    joined,
    opened,
)

SLACK_S = 3.0
LIMIT_S = RANK_DEADLINE_S + SLACK_S


def opening(
    options_of: Callable[[int], dict[str, Any]] = lambda rank: {},
    *,
    build: Callable[[int], Denoiser] = lambda rank: Denoiser(),
    before: Callable[[Rank], object] = lambda rank: None,
) -> Callable[[Rank], Outcome]:
    """The work of ranks that open, and close at once; each tells what came of it."""

    def work(rank: Rank) -> Outcome:
        present = joined(rank)
        before(rank)

        async def main() -> Outcome:
            model = build(rank.rank)
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            started = time.monotonic()
            try:
                async with opened(rank, model, **options_of(rank.rank)) as member:
                    outcome = Outcome(member.offload.statistics().choice.transfer)
            except Exception as failure:
                outcome = failed(failure, time.monotonic() - started)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, state[name]), name
            return outcome

        outcome = anyio.run(main, backend=backend_of(rank))
        assert_nothing_left(present)
        return outcome

    return work


def outcomes_of(size: int, work: Callable[[Rank], Outcome], *, of: list[int] | None = None) -> list[Outcome]:
    with forked_ranks(size, work) as ranks:
        return ranks.answers(of=of)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("window_blocks", (2, 3)),
        ("ranks.gather_chunk_bytes", (4096, 8192)),
        ("ranks.wave_window_s", (0.5, 0.25)),
        ("max_running_requests", (1, 2)),
    ],
)
def test_options_that_differ_are_named_on_every_rank(option: str, values: tuple[Any, Any]) -> None:
    section, _, name = option.rpartition(".")

    def options_of(rank: int) -> dict[str, Any]:
        return {section: {name: values[rank]}} if section else {name: values[rank]}

    for outcome in outcomes_of(2, opening(options_of)):
        assert outcome.errors == ("RanksDisagreeError",)
        assert option in outcome.text
        for rank, value in enumerate(values):
            assert f"rank {rank} has {{" in outcome.text
            assert f"{option!r}: {value}" in outcome.text
        assert outcome.seconds < LIMIT_S


def test_weights_that_differ_are_refused_on_every_rank_with_the_tensor() -> None:
    def build(rank: int) -> Denoiser:
        model = Denoiser()
        with torch.no_grad():
            model.transformer_blocks[3].up.bias[-1] += rank == 2
        return model

    for outcome in outcomes_of(3, opening(build=build)):
        assert outcome.error == "WeightsDifferError", outcome
        assert "rank 2" in outcome.text
        assert "transformer_blocks.3.up.bias" in outcome.text


def test_other_models_are_refused_on_every_rank() -> None:
    def build(rank: int) -> Denoiser:
        return Denoiser((160, 32, 35, 160, 7 + rank))

    for outcome in outcomes_of(2, opening(build=build)):
        assert outcome.error is not None
        assert "rank 1" in outcome.text


#: What the ranks agree on as they open, in order.
AGREEMENTS = ("node", "configuration", "the sources of the weights", "transfer", "what they gather")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("who", "name"), [(1, "node"), (0, "configuration"), (1, "transfer"), (0, "what they gather")])
def test_a_rank_that_dies_or_stands_still_while_it_opens(who: int, name: str, how: signal.Signals) -> None:
    def before(rank: Rank) -> None:
        agree = Coordinator.agree

        async def end(coordinator: Coordinator, what: str, value: object) -> list[Any]:
            if (rank.rank, what) == (who, name):
                os.kill(os.getpid(), how)
            return await agree(coordinator, what, value)

        Coordinator.agree = end  # type: ignore[method-assign] # the process ends soon

    others = [rank for rank in range(3) if rank != who]
    for outcome in outcomes_of(3, opening(before=before), of=others):
        assert (outcome.errors[0], outcome.rank) == ("RankLostError", who), outcome
        assert f"rank {who}" in outcome.text
        assert outcome.seconds < LIMIT_S


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_while_it_opens(who: int) -> None:
    """It has no memory for its window: no other rank can know."""

    def before(rank: Rank) -> None:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no memory is left")

        if rank.rank == who:
            CpuDevice.allocate = refuse  # type: ignore[method-assign] # the process ends soon

    outcomes = outcomes_of(3, opening(before=before))
    assert outcomes[who].error == "MemoryError"
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert (outcome.errors[0], outcome.rank) == ("RankFailedError", who), outcome
            assert "MemoryError: no memory is left" in outcome.text
            assert outcome.seconds < LIMIT_S
