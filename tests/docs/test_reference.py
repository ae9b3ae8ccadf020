"""The reference has every public name, and each says its units and the errors that it raises."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import streamflow
from docsite.docstrings import for_griffe, raised_names
from docsite.error_tree import children, error_tree
from docsite.markers import filled
from docsite.options import options_table
from docsite.units import unit_of
from streamflow.stages.errors import StreamflowError
from tests.docs.blocks import DOCS, PAGES

NAMES = [name for name in streamflow.__all__ if name != "__version__"]
REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")
OPTIONS = [
    "LoadInputs",
    "OffloadConfig",
    "OffloadPlan",
    "RankOptions",
    "StoreOptions",
    "WarmUpRecipe",
    "WeightTopology",
]


def documented() -> Iterator[tuple[str, Any]]:
    """Everything in the reference that can raise: public functions, classes and their public methods."""
    for name in NAMES:
        value = getattr(streamflow, name)
        yield name, value
        if inspect.isclass(value):
            for member, inner in vars(value).items():
                inner = inner.fget if isinstance(inner, property) else getattr(inner, "__func__", inner)
                if not member.startswith("_") and inspect.isfunction(inner):
                    yield f"{name}.{member}", inner


WITH_DOCSTRINGS = dict(documented())


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert REFERENCE.count(f"\n::: streamflow.{name}\n") == 1


def test_every_class_of_options_has_a_table() -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"<!-- generated: options (\w+) -->", text)) == OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
def test_a_table_has_every_option_with_its_unit_and_default(name: str) -> None:
    rows = options_table(name).splitlines()[2:]
    fields = attrs.fields(getattr(streamflow, name))
    assert [row.split("`")[1] for row in rows] == [field.name for field in fields]
    assert all(len(re.split(r"(?<!\\)\|", row)) == 6 and row.count("| |") == 0 for row in rows)


def test_tables_say_units_and_defaults_as_they_are() -> None:
    table = options_table("OffloadConfig")
    assert "| `window_blocks` | blocks | `2` |" in table
    assert "| `registration_piece_bytes` | bytes | 1 GiB |" in table
    assert "| `close_mode` | `'cut'`, `'drain'` | `'cut'` |" in table
    assert "| `probe_deadline_s` | seconds | `20.0` |" in table
    assert "| `dir_mode` | permission bits | `0o755` |" in options_table("StoreOptions")
    assert "| `gather_chunk_bytes` | bytes | 64 MiB |" in options_table("RankOptions")
    assert "| `ring_degree` | ranks | `1` |" in options_table("WeightTopology")


def test_an_option_without_a_unit_or_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @attrs.frozen
    class Wrong:
        """One option.

        Attributes:
            speed: how fast.
        """

        speed: int = 1

    @attrs.frozen
    class Silent:
        """One option."""

        window_blocks: int = 1

    Wrong.__annotations__["speed"] = int
    Silent.__annotations__["window_blocks"] = int
    monkeypatch.setattr(streamflow, "Wrong", Wrong, raising=False)
    monkeypatch.setattr(streamflow, "Silent", Silent, raising=False)
    with pytest.raises(ValueError, match="in which unit"):
        options_table("Wrong")
    with pytest.raises(ValueError, match="not described"):
        options_table("Silent")


@pytest.mark.parametrize("field", attrs.fields(streamflow.OffloadStatistics), ids=lambda field: field.name)
def test_a_number_in_the_statistics_says_what_it_counts(field: Any) -> None:
    assert field.type != "int" or field.name.startswith("num_") or unit_of(field.name)


# Errors


def raised_in(function: Any) -> set[str]:
    """The errors that the function's own body makes and raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


@pytest.mark.parametrize("name", WITH_DOCSTRINGS)
def test_what_is_raised_is_documented_and_exists(name: str) -> None:
    value = WITH_DOCSTRINGS[name]
    said = set(raised_names(inspect.getdoc(value) or ""))
    known = {error.__name__ for error in every_error()} | set(dir(builtins))
    assert said <= known
    body = getattr(value, "__attrs_post_init__", None) if inspect.isclass(value) else inspect.unwrap(value)
    assert raised_in(body) <= said if body is not None else True


@pytest.mark.parametrize("name", ["open_offload", "open_streamed", "offload", "start_offload", "Offload.run"])
def test_what_opens_or_runs_says_what_it_raises(name: str) -> None:
    text = inspect.getdoc(WITH_DOCSTRINGS[name]) or ""
    assert raised_names(text) or "See `open_offload` for arguments and errors" in " ".join(text.split())


def every_error() -> Iterator[type[StreamflowError]]:
    error_tree()  # imports all of the library
    waiting = [StreamflowError]
    while waiting:
        error = waiting.pop()
        yield error
        waiting += children(error)


def test_the_tree_has_every_error_once_with_what_it_says() -> None:
    tree = error_tree()
    for error in every_error():
        assert tree.count(f"- **`{error.__name__}`** (`{error.__module__}`") == 1, error
        assert " ".join((error.__doc__ or "").split()).replace("``", "`") in tree
    assert tree.startswith("- **`StreamflowError`** (`streamflow.stages.errors`): Base of every error")
    assert re.search(
        r"^    - \*\*`DeadlineExceededError`\*\* .*, a `TimeoutError`\): .*`deadline_s`", tree, re.MULTILINE
    )
    assert re.search(r"^        - \*\*`EntryMissingError`\*\*", tree, re.MULTILINE)


# Docstrings and markers


def test_fields_of_docstrings_become_sections() -> None:
    attributes = "Attributes:\n    a, b: both,\n        of them.\n    c: alone."
    text = f"Does it.\n\n{attributes}\n\n:raises X, Y: if so\n    and so.\n\nMore."
    made = for_griffe(text)
    assert "    a: both, of them.\n    b: both, of them.\n    c: alone." in made
    assert made.endswith("More.\n\nRaises:\n    X: if so and so.\n    Y: if so and so.\n")
    assert raised_names(text) == ["X", "Y"]


def test_markers_are_filled_and_unknown_ones_are_refused() -> None:
    assert "`window_blocks`" in filled("# Hi\n\n<!-- generated: options OffloadConfig -->\n")
    with pytest.raises(ValueError, match="nothing makes 'poems'"):
        filled("<!-- generated: poems -->")


def test_every_marker_of_every_page_can_be_filled() -> None:
    for page in PAGES:
        assert "<!-- generated:" not in filled((DOCS / page).read_text(encoding="utf-8")), page
