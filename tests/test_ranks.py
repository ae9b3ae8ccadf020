"""The helper of multi-process tests: it hears what ranks say, ends those that do not end, and leaves none behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ForkedRanks, Rank, forked_ranks, run_ranks


def is_gone(ranks: ForkedRanks) -> bool:
    """Whether none of the processes exists any more, not even as one to be waited for."""

    def exists(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    return not any(exists(pid) for pid in ranks.pids)


def test_ranks_meet_and_answer_by_rank() -> None:
    def work(rank: Rank) -> list[float]:
        rank.join()
        total = torch.full((2,), float(rank.rank))
        dist.all_reduce(total)
        return total.tolist()

    assert run_ranks(3, work) == [[3.0, 3.0]] * 3


def test_a_rank_that_raises_fails_the_test_with_its_traceback() -> None:
    def work(rank: Rank) -> int:
        return 1 // rank.rank

    with forked_ranks(2, work) as ranks:
        with pytest.raises(AssertionError, match=r"rank 0 raised: Traceback(.|\n)*ZeroDivisionError"):
            ranks.answers()
        assert ranks.answers(of=[1]) == [1]


def test_ranks_that_hang_or_stand_still_are_killed() -> None:
    def work(rank: Rank) -> None:
        rank.say("here")
        time.sleep(1000)

    with forked_ranks(2, work, patience_s=0.5) as ranks:
        ranks.stop(0)
        ranks.wait_for("here", of=1)
        with pytest.raises(AssertionError, match=r"not done in time; .*rank 0 is still running"):
            ranks.answers()
    assert is_gone(ranks)


def test_a_rank_that_was_killed_did_not_answer() -> None:
    def work(rank: Rank) -> None:
        rank.say("here")
        time.sleep(1000)

    with forked_ranks(1, work) as ranks:
        ranks.wait_for("here", of=0)
        ranks.kill(0)
        with pytest.raises(AssertionError, match=r"rank 0 died \(it said \['here'\]\)"):
            ranks.answers()
    assert is_gone(ranks)
