"""The options of a class as a table: name, kind and unit, default, and what its docstring says."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import attrs
from griffe import Docstring, DocstringSectionAttributes

import streamflow
from docsite.docstrings import for_griffe
from docsite.units import unit_of

_BINARY = ((1 << 30, "GiB"), (1 << 20, "MiB"))
_KINDS = {bool: "`True` or `False`", str: "text"}


def options_table(class_name: str) -> str:
    """The options of the public class ``class_name`` in Markdown.

    :raises ValueError: if one is not described in the class's docstring, or is a number without a unit.
    """
    cls = getattr(streamflow, class_name)
    described, hints = descriptions(cls), typing.get_type_hints(cls)
    rows = ["| option | value | default | |", "|---|---|---|---|"]
    for field in attrs.fields(cls):
        if field.name not in described:
            raise ValueError(f"{class_name}.{field.name} is not described in the docstring of {class_name}")
        cells = (f"`{field.name}`", kind_of(field.name, hints[field.name]), default_of(field), described[field.name])
        rows.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    return "\n".join(rows)


def descriptions(cls: type) -> dict[str, str]:
    """What the docstring's section *Attributes* says of each."""
    found: dict[str, str] = {}
    for section in Docstring(for_griffe(inspect.getdoc(cls) or "")).parse("google", warnings=False):
        if isinstance(section, DocstringSectionAttributes):
            found |= {item.name: item.description for item in section.value}
    return found


def kind_of(name: str, hint: Any) -> str:
    """The values that an option takes, in words.

    :raises ValueError: if it is a number without a unit.
    """
    kinds = dict.fromkeys(kind for part in _parts(hint) for kind in _kinds(name, part))
    return ", ".join(kinds)


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _kinds(name: str, hint: Any) -> Iterator[str]:
    if hint is type(None):
        yield "`None`"
    elif typing.get_origin(hint) is Literal:
        yield from (f"`{value!r}`" for value in typing.get_args(hint))
    elif hint in (int, float):
        unit = unit_of(name)
        if unit is None:
            raise ValueError(f"the option {name} is a number, and its name does not say in which unit")
        yield unit
    else:
        origin = typing.get_origin(hint) or hint
        yield _KINDS.get(origin, f"`{origin.__name__}`")


def default_of(field: attrs.Attribute[Any]) -> str:
    """An option's default, in words where it is computed."""
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return _made(default.factory)
    if field.name.endswith("_mode") and isinstance(default, int):
        return f"`{default:#o}`"
    if field.name.endswith("_bytes") and isinstance(default, int):
        return _size(default)
    return f"`{default!r}`"


def _made(factory: Any) -> str:
    if not isinstance(factory, type):
        return (inspect.getdoc(factory) or "").partition("\n")[0].rstrip(".")
    return "`{}`" if factory is dict else f"`{factory.__name__}()`"


def _size(nbytes: int) -> str:
    name, unit = next(((name, unit) for unit, name in _BINARY if nbytes and nbytes % unit == 0), ("bytes", 1))
    return f"{nbytes // unit:,} {name}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
