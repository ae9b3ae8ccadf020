"""Members of a link that always want more get equal bytes, whatever the size of their asks; nobody waits for nobody."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.fair_share import MAX_UNDER_WAY, FairShare

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=5)


def all_grants(share: FairShare) -> list[tuple[int, bool]]:
    granted = []
    while (grant := share.grant()) is not None:
        granted.append(grant)
    return granted


def test_who_is_alone_gets_everything_at_once_and_need_not_tell() -> None:
    share = FairShare()
    share.join(7)
    for nbytes in (5, 1, 9):
        share.ask(7, nbytes)
    assert all_grants(share) == [(7, False)] * 3


def test_no_more_than_two_are_under_way_while_the_link_is_shared() -> None:
    share = FairShare()
    share.join(1)
    share.join(2)
    for member in (1, 2):
        for _ in range(3):
            share.ask(member, 10)
    assert len(all_grants(share)) == MAX_UNDER_WAY
    share.done(1)
    assert len(all_grants(share)) == 1


def test_who_leaves_takes_along_what_is_under_way_and_the_rest_go_on() -> None:
    share = FairShare()
    share.join(1)
    share.join(2)
    for _ in range(3):
        share.ask(1, 10)
    assert len(all_grants(share)) == MAX_UNDER_WAY
    share.ask(2, 10)
    share.leave(1)
    share.leave(1)
    share.done(1)
    assert all_grants(share) == [(2, False)]
    assert share.num_members == 1


def test_who_asked_for_nothing_saves_nothing_up() -> None:
    share = FairShare()
    share.join(1)
    share.join(2)
    for _ in range(100):
        share.ask(1, 10)
        assert share.grant() == (1, True)
        share.done(1)
    order = []
    for _ in range(20):
        share.ask(1, 10)
        share.ask(2, 10)
    while (grant := share.grant()) is not None:
        order.append(grant[0])
        share.done(grant[0])
    assert abs(order[:20].count(1) - 10) <= 1


@given(st.lists(SIZES, min_size=2, max_size=4))
def test_members_that_always_ask_get_equal_bytes_up_to_one_ask_each(sizes: list[list[int]]) -> None:
    share, got = FairShare(), [0] * len(sizes)
    waiting = [deque(asks) for asks in sizes]
    for member in range(len(sizes)):
        share.join(member)
        share.ask(member, waiting[member][0])
    largest = [max(asks) for asks in sizes]
    for _ in range(200):
        granted = share.grant()
        assert granted is not None
        member, _ = granted
        got[member] += waiting[member][0]
        waiting[member].rotate(-1)
        share.ask(member, waiting[member][0])
        share.done(member)
        for a in range(len(sizes)):
            for b in range(len(sizes)):
                assert got[a] - got[b] <= largest[a] + largest[b]
