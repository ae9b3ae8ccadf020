"""Docstrings in the dialect that griffe reads: an extension of griffe, and what it does to one docstring."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_RAISES = re.compile(r"^:raises (?P<names>[\w., ]+): (?P<text>.*(?:\n[ ]{4}.*)*)\n?", flags=re.MULTILINE)
_SHARED = re.compile(r"^[ ]{4}(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n[ ]{8}.*)*)", flags=re.MULTILINE)


def for_griffe(docstring: str) -> str:
    """The docstring with its ``:raises`` fields as a section, and with an entry for each attribute of a shared line."""
    rest = _RAISES.sub("", _SHARED.sub(_entries, docstring)).rstrip()
    raises = [_entries(found) for found in _RAISES.finditer(docstring)]
    return "\n".join([rest, "", "Raises:", *raises, ""]) if raises else rest


def raised_names(docstring: str) -> list[str]:
    """The errors that the docstring says are raised."""
    return [name for found in _RAISES.finditer(docstring) for name in found["names"].split(", ")]


def _entries(found: re.Match[str]) -> str:
    text = " ".join(found["text"].split())
    return "\n".join(f"    {name}: {text}" for name in found["names"].split(", "))


class Dialect(Extension):
    """Rewrites every docstring before it is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = for_griffe(obj.docstring.value)
