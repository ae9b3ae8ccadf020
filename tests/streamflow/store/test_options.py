"""Options: defaults, and all problems in one error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from streamflow.store.errors import StoreCode, StoreOptionsError
from streamflow.store.options import StoreOptions


def test_the_defaults_are_those_of_the_design(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = StoreOptions()
    assert options.root == str(tmp_path / "streamflow" / "store")
    assert (options.publication_wait_s, options.verification) == (600.0, "background")
    assert options.max_file_bytes == 5 << 30
    assert options.effective_num_threads >= 1


@pytest.mark.parametrize("cache", ["", "relative"])
def test_without_a_usable_cache_folder_the_home_folder_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert StoreOptions().root == str(tmp_path / ".cache" / "streamflow" / "store")


@pytest.mark.parametrize("name", ["publication_wait_s", "lock_wait_s"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, None, "1", True])
def test_a_wait_must_be_positive_and_finite(name: str, value: Any) -> None:
    with pytest.raises(StoreOptionsError, match=f"{name} must be a positive, finite number"):
        StoreOptions(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verification", "none"),
        ("dir_mode", 0o500),
        ("dir_mode", 0o17777),
        ("file_mode", 0o444),
        ("file_mode", 0o755),
        ("free_space_headroom_bytes", -1),
        ("free_space_headroom_fraction", 1),
        ("free_space_headroom_fraction", -0.1),
        ("max_file_bytes", 0),
        ("num_threads", 0),
        ("num_threads", True),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(StoreOptionsError, match=name) as caught:
        StoreOptions(**{name: value})
    assert caught.value.code is StoreCode.INVALID_CONFIGURATION
    assert not caught.value.is_retryable


def test_all_problems_come_at_once() -> None:
    with pytest.raises(StoreOptionsError) as caught:
        StoreOptions(publication_wait_s=0, max_file_bytes=0, num_threads=0)
    assert len(caught.value.problems) == 3


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="verify"):
        StoreOptions(verify="size")  # type: ignore[call-arg]
