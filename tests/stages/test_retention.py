"""The retention policy: its table of cases, and what it does to workloads that are steady, grow, or shrink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.retention import BoundaryReading, Reason, RetentionPolicy

TOTAL = 1000


def reading(cached: int | None, free: int | None = 500, total: int | None = TOTAL) -> BoundaryReading:
    return BoundaryReading(staged=7, peak=9, cached=cached, free=free, total=total)


def releases(policy: RetentionPolicy, cached: Sequence[int]) -> list[bool]:
    return [policy.decide(reading(value)).releases for value in cached]


@pytest.mark.parametrize(
    ("learned", "now", "reason"),
    [
        ([], reading(0), Reason.WITHIN_BUDGET),
        ([], reading(1), Reason.OVER_BUDGET),
        ([80], reading(100), Reason.WITHIN_BUDGET),
        ([80], reading(101), Reason.OVER_BUDGET),
        ([80, 10], reading(100), Reason.WITHIN_BUDGET),
        ([200], reading(250), Reason.WITHIN_BUDGET),
        ([240], reading(250), Reason.WITHIN_BUDGET),
        ([240], reading(251), Reason.OVER_BUDGET),
        ([80], reading(10, free=50), Reason.WITHIN_BUDGET),
        ([80], reading(10, free=49), Reason.LOW_FREE_MEMORY),
        ([80], reading(500, free=49), Reason.LOW_FREE_MEMORY),
        ([80], reading(0, free=0), Reason.LOW_FREE_MEMORY),
        ([80], reading(None), Reason.TELEMETRY_MISSING),
        ([80], reading(10, free=None), Reason.TELEMETRY_MISSING),
        ([80], reading(10, total=None), Reason.TELEMETRY_MISSING),
    ],
)
def test_the_table(learned: list[int], now: BoundaryReading, reason: Reason) -> None:
    policy = RetentionPolicy()
    releases(policy, learned)
    decided = policy.decide(now)
    assert decided.reason is reason
    assert decided.releases == (reason is not Reason.WITHIN_BUDGET)


def test_it_is_decided_by_the_budget_before_the_observation() -> None:
    policy = RetentionPolicy()
    decided = policy.decide(reading(80))
    assert (decided.budget, decided.releases) == (0, True)
    assert policy.budget == 100
    assert policy.decide(reading(90)).budget == 100


def test_the_budget_is_capped_at_a_quarter_of_the_device() -> None:
    policy = RetentionPolicy()
    decided = policy.decide(reading(900))
    assert decided.cap == 250
    assert policy.budget == 250


def test_a_decision_says_what_it_was_made_of() -> None:
    decided = RetentionPolicy().decide(reading(80, free=400))
    assert attrs.asdict(decided) == {
        "releases": True,
        "reason": Reason.OVER_BUDGET,
        "reading": {"staged": 7, "peak": 9, "cached": 80, "free": 400, "total": TOTAL},
        "budget": 0,
        "cap": 250,
        "deferred": False,
    }


def test_a_reading_with_holes_teaches_nothing() -> None:
    policy = RetentionPolicy()
    policy.decide(reading(None))
    policy.decide(reading(80, total=None))
    assert policy.budget == 0


def test_low_memory_is_learned_from_all_the_same() -> None:
    policy = RetentionPolicy()
    policy.decide(reading(80, free=1))
    assert policy.budget == 100


@pytest.mark.parametrize("reason", [Reason.FAILURE, Reason.OUT_OF_MEMORY, Reason.CLOSING])
@pytest.mark.parametrize("cached", [0, None, 900])
def test_a_forced_release_asks_nothing_and_teaches_nothing(reason: Reason, cached: Any) -> None:
    policy = RetentionPolicy()
    policy.decide(reading(80))
    forced = policy.force(reading(cached), reason)
    assert (forced.releases, forced.reason, forced.budget, forced.cap) == (True, reason, 100, 250)
    assert policy.budget == 100


def test_what_was_learned_is_forgotten_with_the_last_staged_component() -> None:
    policy = RetentionPolicy()
    assert releases(policy, [80, 80]) == [True, False]
    policy.reset()
    assert policy.budget == 0
    assert releases(policy, [80, 80]) == [True, False]


def test_a_steady_workload_is_released_once() -> None:
    assert releases(RetentionPolicy(), [80] * 6) == [True] + [False] * 5


def test_a_growing_workload_is_released_once_for_each_step_of_growth() -> None:
    growing = [80, 80, 120, 120, 120, 190, 190]
    assert releases(RetentionPolicy(), growing) == [True, False, True, False, False, True, False]


def test_a_workload_above_the_cap_is_released_every_time() -> None:
    assert releases(RetentionPolicy(), [400, 400, 400]) == [True, True, True]


@given(st.lists(st.integers(0, 2000), max_size=20))
def test_the_budget_never_shrinks_nor_passes_the_cap(cached: list[int]) -> None:
    policy = RetentionPolicy()
    budgets = [0]
    for value in cached:
        decided = policy.decide(reading(value))
        assert decided.releases == (value > decided.budget)
        budgets.append(policy.budget)
    assert budgets == sorted(budgets)
    assert budgets[-1] <= TOTAL // 4
    assert budgets[-1] == min(TOTAL // 4, int(max(cached, default=0) * 1.25))
