"""An arbiter for each link, as long as somebody uses the link; turns come from wherever they are given up."""

from __future__ import annotations

from streamflow.stages import links
from streamflow.stages.links import LinkArbiter, LinkUser, join_link


def test_equal_links_are_one_and_with_the_last_user_nothing_is_left() -> None:
    told: list[str] = []
    with join_link(("cuda", 0), lambda: told.append("first")) as first:
        first.ask(10)
        first.ask(10)
        assert list(first.turns) == [False, False]
        first.turns.clear()
        with join_link(("cuda", 0), lambda: told.append("second")) as second, join_link(("cuda", 1), print) as apart:
            apart.ask(10)
            assert list(apart.turns) == [False]
            second.ask(10)
            first.ask(10)
            first.ask(10)
            assert (list(first.turns), list(second.turns)) == ([True], [True])
            assert told == []
            second.done()
            assert (list(first.turns), told) == ([True, True], ["first"])
            assert len(links._arbiters) == 2
        assert len(links._arbiters) == 1
        first.ask(10)
        assert list(first.turns) == [True, True, False]
    assert links._arbiters == {}


def test_who_leaves_gives_its_turns_up_to_those_who_wait() -> None:
    told: list[str] = []
    with join_link("one", lambda: told.append("first")) as first:
        with join_link("one", print) as second:
            second.ask(10)
            second.ask(10)
            first.ask(10)
            assert not first.turns
        assert (list(first.turns), told) == ([False], ["first"])
        second.done()  # a copy that ends after its engine left
        second.ask(10)
        assert not second.turns or len(second.turns) == 2


def test_one_who_leaves_while_turns_are_handed_out_keeps_nobody_from_hearing_of_his() -> None:
    arbiter, told = LinkArbiter(), list[str]()
    users: dict[str, LinkUser] = {}

    def first_is_told() -> None:
        told.append("first")
        arbiter.leave(users["gone"])

    users["holder"] = arbiter.join(print)
    users["first"] = arbiter.join(first_is_told)
    users["gone"] = arbiter.join(lambda: told.append("gone"))
    users["last"] = arbiter.join(lambda: told.append("last"))
    for name in ("holder", "holder", "first", "gone", "last"):
        users[name].ask(10)
    arbiter.leave(users["holder"])
    assert [name for name in ("first", "last") if name in told] == ["first", "last"]
