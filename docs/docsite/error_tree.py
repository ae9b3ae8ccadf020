"""All errors of the library as a nested list: who refines whom, the fields, and when it is raised."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator

import streamflow
from streamflow.stages.errors import StreamflowError

#: Folders whose errors no user of the library meets.
_LEFT_OUT = ("streamflow.tools", "streamflow.stages.testing", "streamflow.__main__")


def error_tree() -> str:
    """The tree in Markdown, from `StreamflowError` down."""
    for module in pkgutil.walk_packages(streamflow.__path__, "streamflow.", onerror=_raise):
        if not module.name.startswith(_LEFT_OUT):
            importlib.import_module(module.name)
    return "\n".join(_lines(StreamflowError, 0))


def _raise(name: str) -> None:
    raise ImportError(f"{name} cannot be imported", name=name)


def _lines(error: type[StreamflowError], depth: int) -> Iterator[str]:
    yield "    " * depth + f"- {_described(error)}"
    for child in children(error):
        yield from _lines(child, depth + 1)


def children(error: type[StreamflowError]) -> list[type[StreamflowError]]:
    """The errors of the library that refine ``error`` directly, by name."""
    found = [child for child in error.__subclasses__() if child.__module__.startswith("streamflow.")]
    return sorted((child for child in found if not child.__module__.startswith(_LEFT_OUT)), key=lambda c: c.__name__)


def _described(error: type[StreamflowError]) -> str:
    builtins = [base.__name__ for base in error.__bases__ if base.__module__ == "builtins"]
    refined = f", a `{builtins[0]}`" if builtins and builtins[0] != "Exception" else ""
    said = " ".join((inspect.getdoc(error) or "").split()).replace("``", "`")
    fields = ", ".join(f"`{name}`" for name in fields_of(error))
    return f"**`{error.__name__}`** (`{error.__module__}`{refined}): {said}" + (f" Fields: {fields}." if fields else "")


def fields_of(error: type[StreamflowError]) -> list[str]:
    """What the error's own ``__init__`` keeps, in its order."""
    if "__init__" not in vars(error):
        return []
    body = ast.parse(textwrap.dedent(inspect.getsource(error.__init__)))
    names = [node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute) and _is_kept(node)]
    return list(dict.fromkeys(names))


def _is_kept(node: ast.Attribute) -> bool:
    is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
    return is_own and isinstance(node.ctx, ast.Store) and not node.attr.startswith("_")
