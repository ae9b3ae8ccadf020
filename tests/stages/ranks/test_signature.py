"""Signatures of waves: what they count, how they differ, how they travel, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from streamflow.stages.ranks.signature import WaveSignature, WaveSignatureError

steps = st.lists(st.tuples(st.text(min_size=1, max_size=4), st.integers(1, 5)), min_size=1, max_size=4)
signatures = st.builds(WaveSignature, steps, st.integers(1, 3), st.text(max_size=4))


def test_every_pass_of_every_step_is_a_walk_in_order() -> None:
    signature = WaveSignature((("high", 2), ("low", 1), ("high", 1)), passes_per_step=2)
    assert signature.walks() == ("high",) * 4 + ("low",) * 2 + ("high",) * 2
    assert signature.num_walks == 8


@given(signatures)
def test_walks_are_as_many_as_announced(signature: WaveSignature) -> None:
    assert len(signature.walks()) == signature.num_walks


@given(signatures)
def test_a_signature_travels_as_it_is(signature: WaveSignature) -> None:
    assert WaveSignature.from_wire(json.loads(json.dumps(signature.to_wire()))) == signature


@given(signatures, signatures)
def test_differences_are_named_exactly_where_there_are_any(one: WaveSignature, other: WaveSignature) -> None:
    assert (one.differences(other) == "") == (one == other)
    assert ("pattern" in one.differences(other)) == (one.pattern != other.pattern)


def test_differences_say_both_values() -> None:
    one, other = WaveSignature((("t", 30),)), WaveSignature((("t", 28),), passes_per_step=2)
    assert one.differences(other) == "steps [['t', 30]] against [['t', 28]]; passes_per_step 1 against 2"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("steps", {"steps": ()}),
        ("steps", {"steps": "transformer"}),
        ("steps", {"steps": 30}),
        ("steps", {"steps": ("transformer", 30)}),
        ("steps", {"steps": (("transformer", 0),)}),
        ("steps", {"steps": (("transformer", True),)}),
        ("steps", {"steps": (("", 1),)}),
        ("steps", {"steps": ((1, 1),)}),
        ("passes_per_step", {"steps": (("t", 1),), "passes_per_step": 0}),
        ("passes_per_step", {"steps": (("t", 1),), "passes_per_step": 1.5}),
        ("pattern", {"steps": (("t", 1),), "pattern": None}),
    ],
)
def test_what_cannot_be_walked_is_refused_by_field(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(WaveSignatureError, match=field) as caught:
        WaveSignature(**values)
    assert caught.value.field == field


@pytest.mark.parametrize("values", [{}, {"steps": [["t", 1]]}, {**WaveSignature((("t", 1),)).to_wire(), "more": 1}])
def test_other_fields_on_the_wire_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(WaveSignatureError, match="passes_per_step"):
        WaveSignature.from_wire(values)
