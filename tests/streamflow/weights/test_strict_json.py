"""JSON that can be read in only one way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamflow.weights.strict_json import StrictJSONError, load_object


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "a": 1}', "'a' comes twice"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' comes twice"),
        (b'{"a": [{"b": 1, "b": 2}]}', "'b' comes twice"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"[1]", "an object was expected, not a list"),
        (b"{}x", "Extra data at character 2"),
        (b"", "Expecting value"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "1e999 is larger than any number"),
        (b'{"\\ud800": 1}', "half a surrogate pair"),
        (b'{"a": "\\udfff"}', "half a surrogate pair"),
        (b'{"a": [["\\udfff"]]}', "half a surrogate pair"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_other_readers_might_take_otherwise_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(StrictJSONError, match=words):
        load_object(data)


def test_huge_integers_stay_out_of_range_and_cost_nothing() -> None:
    found = load_object(b'{"a": ' + b"9" * 100_000 + b', "b": -' + b"9" * 100_000 + b', "c": -0}')
    assert isinstance(found["a"], int)
    assert found["a"] > 2**64
    assert isinstance(found["b"], int)
    assert found["b"] < -(2**64)
    assert isinstance(found["c"], float)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_ordinary_objects_are_read_as_the_standard_reader_does(value: dict[str, object]) -> None:
    data = json.dumps(value).encode()
    assert load_object(data) == json.loads(data)
