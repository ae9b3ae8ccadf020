"""Pages say by a comment where something that is made from the code belongs."""

from __future__ import annotations

import re
from collections.abc import Callable

from docsite.error_tree import error_tree
from docsite.many_nodes import many_nodes_table
from docsite.options import options_table
from docsite.parallelism import parallelism_table

_MARKER = re.compile(r"^<!-- generated: (?P<what>\w+) ?(?P<of>\w*) -->$", flags=re.MULTILINE)
_MAKERS: dict[str, Callable[..., str]] = {
    "options": options_table,
    "errors": error_tree,
    "parallelism": parallelism_table,
    "many_nodes": many_nodes_table,
}


def filled(markdown: str) -> str:
    """``markdown`` with every marker replaced.

    :raises ValueError: if a marker asks for what nobody makes.
    """
    return _MARKER.sub(_made, markdown)


def _made(marker: re.Match[str]) -> str:
    if marker["what"] not in _MAKERS:
        raise ValueError(f"{marker[0]}: nothing makes {marker['what']!r}; there are {', '.join(_MAKERS)}")
    return _MAKERS[marker["what"]](*filter(None, [marker["of"]]))
