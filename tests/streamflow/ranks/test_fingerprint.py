"""What has to be equal on all ranks is compared field by field."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow import OffloadConfig
from streamflow.ranks.fingerprint import EQUAL, OWN, differing, fingerprint
from tests.streamflow.test_faults_options import EVERY_OPTION

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2)
)
FIELDS = st.dictionaries(st.sampled_from("abc"), JSON | st.dictionaries(st.sampled_from("xy"), JSON))


def test_of_each_option_it_is_said_whether_ranks_may_differ_in_it() -> None:
    assert sorted((*EQUAL, *OWN)) == sorted(field.name for field in attrs.fields(OffloadConfig))


def test_a_fingerprint_survives_the_wire_and_equals_its_own() -> None:
    value = fingerprint(OffloadConfig(**{**EVERY_OPTION, "store_mode": "preferred"}))
    assert json.loads(json.dumps(value)) == value
    assert differing([value, json.loads(json.dumps(value))]) == []


@pytest.mark.parametrize("name", [name for name in EVERY_OPTION if name != "store_mode"])
def test_only_options_that_must_be_equal_make_a_difference(name: str) -> None:
    ranks = [fingerprint(config) for config in (OffloadConfig(device="cpu"), _with(name))]
    found = {field.partition(".")[0] for field in differing(ranks)}
    assert found - {"max_passes_per_walk"} == ({name} if name in EQUAL else set()) - {"max_passes_per_walk"}


def _with(name: str) -> OffloadConfig:
    return OffloadConfig(**{"device": "cpu", name: EVERY_OPTION[name]})


def test_fields_of_groups_are_named_and_the_tensor_parallel_rank_is_left_out() -> None:
    ranks = [
        OffloadConfig(
            topology={"tensor_parallel_size": 2, "tensor_parallel_rank": rank},  # type: ignore[arg-type]
            ranks={"gather_chunk_bytes": 1024 * (1 + rank)},  # type: ignore[arg-type]
        )
        for rank in (0, 1)
    ]
    assert differing([fingerprint(config) for config in ranks]) == ["ranks.gather_chunk_bytes"]


@given(values=FIELDS, count=st.integers(1, 4))
def test_equal_values_do_not_differ(values: dict[str, Any], count: int) -> None:
    assert differing([values] * count) == []


@given(one=FIELDS, other=FIELDS, order=st.permutations([0, 0, 1]))
def test_differing_fields_are_named_whoever_differs(
    one: dict[str, Any], other: dict[str, Any], order: list[int]
) -> None:
    found = differing([(one, other)[index] for index in order])
    assert (found == []) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))
    assert found == sorted(found)
    for name in {field.partition(".")[0] for field in found}:
        assert name not in one or name not in other or json.dumps(one[name]) != json.dumps(other[name])


def test_a_number_and_a_truth_value_differ_though_python_calls_them_equal() -> None:
    assert differing([{"a": 1}, {"a": True}]) == ["a"]
    assert differing([{"a": 1}, {}]) == ["a"]
