"""The text of which every digest on disk is made: another one would make every stored entry unknown."""

from __future__ import annotations

import math

import pytest

from streamflow.canonical_json import canonical_json
from streamflow.host_weights.plain_values import digest_of


def test_the_text_is_what_it_always_was() -> None:
    value = {"b": [1, 2.5, True, None], "a": {"ü": 'x"\n', "10": 1e30, "9": -0.0}}
    text = b'{"a":{"10":1e+30,"9":-0.0,"\\u00fc":"x\\"\\n"},"b":[1,2.5,true,null]}'
    assert canonical_json(value) == canonical_json(value, infinities=True) == text
    assert digest_of(value) == "3df3e1afc1c1adcfa0f8097cdaf232ad09a94bd320cf01e9b52d57adab8582a2"


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_written_to_be_read_has_no_infinities(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": [number]})


def test_what_is_compared_may_have_them() -> None:
    assert canonical_json([math.inf, -math.inf, math.nan], infinities=True) == b"[Infinity,-Infinity,NaN]"
    assert digest_of({"deadline": math.inf}) == "1866249dd5b2f7f28073f64d90631de7defdde836c539cea803b8fcae3a3e19e"
