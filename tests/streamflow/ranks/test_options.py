"""The options of many ranks: each validated by its name, all problems at once, none lost."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from streamflow import OffloadConfig, RankOptions, WaveSignature
from streamflow.errors import ConfigurationError

WRONG: dict[str, list[Any]] = {
    "gather": ["yes", None, True],
    "gather_chunk_bytes": [0, 255, -1, 1e6, True, None],
    "local_blocks": ["all", None, ["blocks.0"], ("",), (1,)],
    "wave_window_s": [-0.1, float("inf"), float("nan"), None, "1", True],
    "wave_deadline_s": [0, -1, float("inf"), None, True, 0.4],  # 0.4: less than the window
    "rank_deadline_s": [0, -1, float("nan"), "10", 0.4],  # 0.4: less than ten heartbeats
    "heartbeat_s": [0, -1, None, float("inf")],
    "member_deadline_s": [0, -1, float("inf"), "600", True],
    "default_wave": [
        "transformer",
        3,
        {},
        {"steps": []},
        {"steps": [["transformer", 0]]},
        {"steps": [["transformer", 1]], "passes": 2},
        {"steps": [["transformer", 1]], "passes_per_step": 0},
    ],
}


def test_every_option_is_checked_here() -> None:
    assert list(WRONG) == [field.name for field in attrs.fields(RankOptions)]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_out_of_range_is_refused_by_the_name_of_its_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RankOptions(**{name: value})
    (problem,) = caught.value.problems
    assert problem.startswith(name)
    with pytest.raises(ConfigurationError, match=f"- ranks: {name}"):
        OffloadConfig(ranks={name: value})  # type: ignore[arg-type]


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RankOptions(**{name: values[0] for name, values in WRONG.items()})
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == list(WRONG)


def test_a_mapping_is_the_signature_that_it_describes() -> None:
    wave = WaveSignature((("encoder", 1), ("transformer", 30)), passes_per_step=2)
    options = {
        "gather": "always",
        "default_wave": {"steps": [["encoder", 1], ["transformer", 30]], "passes_per_step": 2},
    }
    config = OffloadConfig.from_mapping({"ranks": options})
    assert config.ranks == RankOptions(gather="always", default_wave=wave)
    assert hash(config.ranks) == hash(RankOptions(gather="always", default_wave=wave))
    assert config.effective()["ranks"]["default_wave"]["passes_per_step"] == 2


def test_a_heartbeat_that_is_too_slow_for_the_deadline_is_refused_with_both() -> None:
    with pytest.raises(ConfigurationError, match="rank_deadline_s is 10, less than 10 times heartbeat_s=2"):
        RankOptions(heartbeat_s=2.0)


def test_limits_are_taken() -> None:
    least = RankOptions(gather_chunk_bytes=256, local_blocks=(), wave_window_s=0, rank_deadline_s=1, heartbeat_s=0.1)
    assert least.local_blocks == ()
