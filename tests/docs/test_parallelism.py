"""The page on ranks has the code's own table of what is supported together."""

from __future__ import annotations

from docsite.markers import filled
from docsite.parallelism import parallelism_table
from streamflow.ranks.matrix import FINAL_METHODS, TABLE, Way
from tests.docs.blocks import DOCS


def test_the_table_has_a_row_for_each_axis_and_says_yes_or_no_in_each_cell() -> None:
    heading, ruler, *rows = parallelism_table().splitlines()
    assert heading.count("|") == ruler.count("|") == 2 + len(Way)
    for row, line in zip(TABLE, rows, strict=True):
        title, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        assert title == row.title
        for way, cell in zip(Way, cells, strict=True):
            said = row.cell(way)
            is_refused_alone = said.refused is not None and said.beside is None
            assert cell.startswith("**no**: " if is_refused_alone else "yes")
            assert ("**no**: " in cell) == (said.refused is not None)
            assert said.note in cell
        assert "{" not in line


def test_the_exception_for_final_methods_is_said() -> None:
    (line,) = (line for line in parallelism_table().splitlines() if line.startswith("| online quantization"))
    assert all(f"`{method}` yes" in line for method in FINAL_METHODS)


def test_the_page_has_the_table() -> None:
    assert parallelism_table() in filled((DOCS / "ranks.md").read_text(encoding="utf-8"))
