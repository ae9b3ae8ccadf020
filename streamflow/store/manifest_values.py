"""Take the values of a manifest one by one, each of exactly the type that it must have. Pure: no torch.

Every reader raises `ManifestError` for a value that it does not take.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

Value = TypeVar("Value")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMIT = 2**63


class ManifestError(ValueError):
    """The bytes are not the manifest of an entry; the message says why."""


class Fields:
    """The fields of an object, each to be taken once; what is wrong with one says where it is."""

    def __init__(self, value: object) -> None:
        self._left = dict(an_object(value))

    def take(self, name: str, read: Callable[[object], Value]) -> Value:
        """What ``read`` makes of this field.

        :raises ManifestError: if there is none, or ``read`` raises one.
        """
        if name not in self._left:
            raise ManifestError(f"there is no {name}")
        try:
            return read(self._left.pop(name))
        except ManifestError as failure:
            raise ManifestError(f"{name}: {failure}") from None

    def finish(self) -> None:
        """Nothing, if every field was taken.

        :raises ManifestError: if one was not.
        """
        if self._left:
            raise ManifestError(f"there are the unknown fields {sorted(self._left)}")


def each(read: Callable[[object], Value]) -> Callable[[object], tuple[Value, ...]]:
    """Reads lists of what ``read`` reads."""

    def read_all(value: object) -> tuple[Value, ...]:
        if not isinstance(value, list):
            raise ManifestError("it must be a list")
        found: list[Value] = []
        try:
            for item in value:
                found.append(read(item))
        except ManifestError as failure:
            raise ManifestError(f"number {len(found)}: {failure}") from None
        return tuple(found)

    return read_all


def an_object(value: object) -> dict[str, Any]:
    """``value``, an object."""
    if not isinstance(value, dict):
        raise ManifestError("it must be an object")
    return value


def text(value: object) -> str:
    """``value``, a text."""
    if not isinstance(value, str):
        raise ManifestError("it must be a text")
    return value


def text_or_none(value: object) -> str | None:
    """``value``, a text or null."""
    return None if value is None else text(value)


def texts(value: object) -> tuple[str, ...]:
    """``value``, a list of texts."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ManifestError("it must list texts")
    return tuple(value)


def sizes(value: object) -> tuple[int, ...]:
    """``value``, a list of sizes."""
    if not isinstance(value, list) or not all(map(_is_size, value)):
        raise ManifestError("it must list integers from 0 to 2**63 - 1")
    return tuple(value)


def size(value: object) -> int:
    """``value``, an integer from 0 to 2**63 - 1."""
    if not _is_size(value):
        raise ManifestError("it must be an integer from 0 to 2**63 - 1")
    return value


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LIMIT  # bool is an int to Python


def digest(value: object) -> str:
    """``value``, a SHA-256 in hexadecimal digits."""
    found = text(value)
    if not _DIGEST.fullmatch(found):
        raise ManifestError("it must be 64 hexadecimal digits")
    return found
