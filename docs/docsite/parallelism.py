"""The table of what is supported together, as it is in the code."""

from __future__ import annotations

from streamflow.ranks.matrix import TABLE, Axis, Cell, Row, Way

#: The heading of each column.
_HEADINGS = {
    Way.GATHERED: "gathered",
    Way.RANK_LOCAL: "rank-local",
    Way.CHECKPOINT: "straight from the checkpoint",
    Way.STORE: "from the store",
}


def parallelism_table() -> str:
    """The table in Markdown: a row for each axis, a column for each way of getting weights."""
    rows = [f"| | {' | '.join(_HEADINGS.values())} |", "|---" * (1 + len(_HEADINGS)) + "|"]
    return "\n".join([*rows, *map(_row, TABLE)])


def _row(row: Row) -> str:
    return f"| {row.title} | {' | '.join(_said(row, row.cell(way)) for way in _HEADINGS)} |"


def _said(row: Row, cell: Cell) -> str:
    note = f": {cell.note}" if cell.note else ""
    if cell.refused is None:
        return f"yes{note}"
    reason = f"**no**: {cell.refused.format(n=row.stands_for)}"
    if cell.beside is not None:
        return f"yes{note}; beside several {_title(cell.beside)} ranks {reason}"
    methods = ", ".join(f"`{method}`" for method in cell.unless)
    return f"{reason}; {methods} yes{note}" if cell.unless else reason


def _title(axis: Axis) -> str:
    return next(row.title for row in TABLE if row.axis is axis)
