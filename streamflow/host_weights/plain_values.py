"""Turning configuration values into JSON that is the same for the same values. Pure."""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from streamflow.canonical_json import canonical_json


class NotPlainError(TypeError):
    """A value has no stable JSON form; ``path`` says where it is."""

    def __init__(self, path: str, value: object) -> None:
        self.path = path
        super().__init__(f"{path} is a {type(value).__name__}, which has no stable form; declare it as plain values")


def plain(value: Any, path: str) -> Any:
    """``value`` as JSON has it: paths, enums and dtypes as text, tuples and sets as lists.

    :raises NotPlainError: if it holds anything else, whose text could differ from run to run.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return plain(value.value, path)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, path) for item in value), key=partial(canonical_json, infinities=True))
    if attrs.has(type(value)):
        return plain(attrs.asdict(value, recurse=False), path)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    raise NotPlainError(path, value)


def digest_of(value: Any) -> str:
    """SHA-256, in hex, of plain values."""
    return hashlib.sha256(canonical_json(value, infinities=True)).hexdigest()
