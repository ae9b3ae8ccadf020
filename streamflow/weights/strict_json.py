"""JSON as a file header must be: one UTF-8 object, no key twice, no number that could be read in two ways."""

from __future__ import annotations

import json
import math

# Longer texts cannot be 64-bit integers; cutting them keeps the value out of range and int() fast.
_INT_TEXT_LIMIT = 24


class StrictJSONError(ValueError):
    """The bytes are not such an object; the message says why."""


def load_object(data: bytes) -> dict[str, object]:
    """The object that ``data`` holds; whitespace may follow it, nothing else.

    :raises StrictJSONError: if the bytes are not UTF-8, not JSON, not an object, nested too deeply, hold a key twice at
        any level, a number that is not finite, or a lone surrogate.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_distinct_pairs,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
        )
        if b"\\u" in data:  # no other way leads to one, and most files need not be searched
            _refuse_surrogates(value)
    except UnicodeDecodeError as failure:
        raise StrictJSONError(f"it is not UTF-8 at byte {failure.start}") from failure
    except json.JSONDecodeError as failure:
        raise StrictJSONError(f"{failure.msg} at character {failure.pos}") from failure
    except RecursionError as failure:
        raise StrictJSONError("it is nested too deeply") from failure
    if not isinstance(value, dict):
        raise StrictJSONError(f"an object was expected, not a {type(value).__name__}")
    return value


def _distinct_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise StrictJSONError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return result


def _refuse_surrogates(value: object) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as failure:
            raise StrictJSONError(f"the text {value!r} holds half a surrogate pair") from failure
    elif isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            _refuse_surrogates(item)


def _refuse_constant(text: str) -> object:
    raise StrictJSONError(f"{text} is not a JSON number")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJSONError(f"{text[:_INT_TEXT_LIMIT]} is larger than any number")
    return value


def _parse_int(text: str) -> int | float:
    # other readers take "-0" for a float; so do we, that it is refused wherever a size is expected
    return -0.0 if text == "-0" else int(text[:_INT_TEXT_LIMIT])
