"""Threads that call the model directly, where ranks gather: a call that fails is no member of its wave any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import streamflow
from streamflow.ranks.topology import RankGroups
from tests.ranks import Rank, run_ranks
from tests.streamflow.ranks.joint import (
    STEPS,
    Denoiser,
    alone,
    asked_of,
    assert_nothing_left,
    joined,
    options,
    wait_there,
)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_a_direct_call_that_is_torn_leaves_its_rank_feeding(who: int, failure: type[BaseException]) -> None:
    def tear(module: nn.Module, args: Any) -> None:
        raise failure

    def make(rank: Rank, model: Denoiser) -> str:
        if rank.rank != who:
            return asked_of(rank.rank).make(model)
        x = torch.zeros(2, asked_of(0).embedding().shape[1])
        with torch.no_grad():
            model(x, asked_of(0).embedding())
            hook = model.transformer_blocks[2].register_forward_pre_hook(tear)
            with pytest.raises(failure):
                model(x, asked_of(0).embedding())
            hook.remove()
        return "torn"

    def open_and_make(rank: Rank) -> str:
        model = Denoiser()
        given = options(ranks={"default_wave": {"steps": (("Denoiser", STEPS),)}}, max_running_requests=1)
        groups = RankGroups(data_parallel=torch.distributed.group.WORLD)
        with streamflow.offload(model, given, ranks=groups):
            made = make(rank, model)
            (rank.folder / f"made-{rank.rank}").touch()
            wait_there(rank, f"made-{1 - rank.rank}")
        return made

    def work(rank: Rank) -> object:
        before = joined(rank)
        made = open_and_make(rank)
        assert_nothing_left(before)
        return made

    answers = run_ranks(2, work, patience_s=15)
    assert answers[who] == "torn"
    assert answers[1 - who] == alone(asked_of(1 - who))
