"""Ranks find each other through a store that remembers all that went wrong before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from streamflow.stages.ranks.errors import RankLostError
from streamflow.stages.ranks.meeting import Meeting, default_store

Come = Callable[..., "Future[str]"]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8, "meeting") as pool:
        yield pool


@pytest.fixture
def come(pool: ThreadPoolExecutor) -> Come:
    store = HashStore()

    def come(rank: int, size: int = 3, timeout_s: float = 20.0) -> Future[str]:
        return pool.submit(Meeting(store, "here", rank, size).meet, timeout_s)

    return come


def test_all_get_one_name_each_time_another(come: Come) -> None:
    names = [{meeting.result() for meeting in [come(rank) for rank in order]} for order in ((0, 1, 2), (2, 1, 0))]
    assert [len(same) for same in names] == [1, 1]
    assert names[0] != names[1]


def test_who_does_not_come_is_named_to_all_that_did(come: Come) -> None:
    waiting = [come(1), come(0, timeout_s=0.2)]
    for meeting in waiting:
        with pytest.raises(RankLostError, match="rank 2 is lost: it did not come") as caught:
            meeting.result()
        assert caught.value.rank == 2


def test_a_rank_that_waited_in_vain_is_not_taken_for_one_that_is_here(come: Come) -> None:
    with pytest.raises(RankLostError) as caught:
        come(1, timeout_s=0.1).result()
    assert caught.value.rank == 0
    with pytest.raises(RankLostError) as caught:
        come(0, size=2, timeout_s=0.1).result()
    assert caught.value.rank == 1


def test_after_a_meeting_that_failed_there_is_one_that_does_not(come: Come) -> None:
    with pytest.raises(RankLostError):
        come(0, size=2, timeout_s=0.1).result()
    with pytest.raises(RankLostError):
        come(1, size=2, timeout_s=0.1).result()
    first, second = come(1, size=2), come(0, size=2)
    assert first.result() == second.result()


def test_a_rank_that_gives_up_says_so(pool: ThreadPoolExecutor) -> None:
    meeting = Meeting(HashStore(), "here", 0, 2)
    waiting = pool.submit(meeting.meet, 20.0)
    meeting.give_up()
    with pytest.raises(RankLostError, match="gave up"):
        waiting.result(timeout=10)


def test_without_torch_distributed_there_is_no_store() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        default_store()
