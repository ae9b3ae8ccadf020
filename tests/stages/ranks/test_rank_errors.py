"""Errors between ranks say who, what and what to do; options that cannot work are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from streamflow.stages.errors import StreamflowError
from streamflow.stages.ranks.errors import (
    GatherError,
    OutOfTurnError,
    RankClosedError,
    RankError,
    RankFailedError,
    RankLostError,
    RanksDisagreeError,
    WaveMismatchError,
    WaveOptionsError,
    WaveTimeoutError,
)
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.signature import WaveSignature

ONE, OTHER = WaveSignature((("t", 30),)), WaveSignature((("t", 28),))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            GatherError(1, 4, "timed out"),
            RuntimeError,
            "rank 1 of 4 could not gather a block from the others: timed out",
        ),
        (RankLostError(3, "silent"), RankError, "rank 3 is lost: silent; close the offload on every rank"),
        (RankFailedError(3, "broke"), RankError, "rank 3 failed: broke; close the offload on every rank"),
        (RankClosedError(3), RankError, "rank 3 has closed its offload"),
        (RankClosedError(3), RuntimeError, "let the ranks close together"),
        (
            WaveMismatchError("a", ONE, "request 'b' of rank 2", OTHER),
            ValueError,
            r"'a' .* request 'b' of rank 2: steps",
        ),
        (WaveTimeoutError("a", 61.26, 60.0), TimeoutError, "'a' waited 61.3 s for a wave, .* wave_deadline_s=60"),
        (
            RanksDisagreeError("options", [1, 2], ["window"]),
            ValueError,
            "options .in window.: rank 0 has 1, rank 1 has 2",
        ),
        (RanksDisagreeError("the model", ["x", "y"]), ValueError, "the ranks differ in the model: rank 0 has 'x'"),
        (OutOfTurnError("t", 7, "a"), RuntimeError, "request 'a' wants block 7 of 't' out of turn"),
        (OutOfTurnError("t", 7, None), RuntimeError, "a direct call wants block 7"),
    ],
)
def test_an_error_refines_a_builtin_and_says_what_to_do(error: Exception, kind: type[Exception], words: str) -> None:
    assert isinstance(error, StreamflowError)
    with pytest.raises(kind, match=words):
        raise error


def test_the_defaults_work() -> None:
    options = WaveOptions(max_passes=1)
    assert (options.idle_heartbeat_s, options.lost_after_s) == (0.25, 7.5)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("max_passes", {"max_passes": 0}),
        ("max_passes", {"max_passes": True}),
        ("window_s", {"window_s": -1}),
        ("window_s", {"window_s": "1"}),
        ("window_s", {"window_s": True}),
        ("deadline_s", {"deadline_s": math.inf}),
        ("deadline_s", {"deadline_s": 0.4}),
        ("heartbeat_s", {"heartbeat_s": 0}),
        ("rank_deadline_s", {"rank_deadline_s": math.nan}),
        ("rank_deadline_s", {"rank_deadline_s": 0.49}),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(option: str, values: dict[str, Any]) -> None:
    with pytest.raises(WaveOptionsError, match=option) as caught:
        WaveOptions(**{"max_passes": 1, **values})
    assert caught.value.option == option
