"""Who is waited for between two walks, and how long."""

from __future__ import annotations

import pytest

from streamflow.stages.returns import FIRST_GAP_S, MAX_MAKERS, MAX_SHARE_OF_WALK, SPARE_S, Returns

WALK_S = 1.0
LIMIT_S = MAX_SHARE_OF_WALK * WALK_S


def after_passes(*gaps_s: float, walk_s: float = WALK_S) -> tuple[Returns, float]:
    """Maker 1 made passes of a second, with these gaps between them; the last one has just ended."""
    returns, now = Returns(), 0.0
    returns.walked("a", walk_s)
    for gap_s in (*gaps_s, None):
        returns.began(1, "a", now)
        now += 1.0
        returns.ended(1, now)
        now += gap_s or 0.0
    return returns, now


def test_nobody_is_waited_for_before_a_pass_ended() -> None:
    returns = Returns()
    returns.walked("a", WALK_S)
    assert returns.expected_until("a") is None
    returns.began(1, "a", 0.0)
    assert returns.expected_until("a") is None


def test_a_maker_is_waited_for_as_long_as_twice_its_last_gap() -> None:
    returns, now = after_passes()
    assert returns.expected_until("a") == pytest.approx(now + 2 * FIRST_GAP_S + SPARE_S)
    returns, now = after_passes(0.01)
    assert returns.expected_until("a") == pytest.approx(now + 0.02 + SPARE_S)
    returns, now = after_passes(0.01, 0.1)
    assert returns.expected_until("a") == pytest.approx(now + 0.2 + SPARE_S)


def test_nobody_is_waited_for_longer_than_half_a_walk_nor_whose_gap_is_longer() -> None:
    returns, now = after_passes(0.9 * LIMIT_S)
    assert returns.expected_until("a") == pytest.approx(now + LIMIT_S)
    returns, now = after_passes(1.1 * LIMIT_S)
    assert returns.expected_until("a") == pytest.approx(now)
    returns, now = after_passes(walk_s=0.02)
    assert returns.expected_until("a") == pytest.approx(now)


def test_a_maker_that_was_late_once_is_waited_for_again_when_it_is_quick_again() -> None:
    returns, now = after_passes(5.0, 0.01)
    assert returns.expected_until("a") == pytest.approx(now + 0.02 + SPARE_S)


def test_who_is_gone_back_or_at_another_component_is_not_waited_for() -> None:
    for leave in (
        lambda returns, now: returns.gone(1),
        lambda returns, now: returns.began(1, "a", now),
        lambda returns, now: returns.began(1, "b", now),
    ):
        returns, now = after_passes(0.01)
        leave(returns, now)
        assert returns.expected_until("a") is None


def test_the_last_one_expected_counts() -> None:
    returns, now = after_passes(0.01)
    returns.began(2, "a", now)
    returns.ended(2, now + 3.0)
    assert returns.expected_until("a") == pytest.approx(now + 3.0 + 2 * FIRST_GAP_S + SPARE_S)


def test_makers_that_never_say_they_are_gone_are_forgotten_oldest_first() -> None:
    returns = Returns()
    returns.walked("a", WALK_S)
    for maker in range(2 * MAX_MAKERS):
        returns.began(maker, "a", float(maker))
        returns.ended(maker, float(maker))
    assert len(returns._makers) == MAX_MAKERS
    assert min(returns._makers) == MAX_MAKERS
