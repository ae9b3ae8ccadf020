"""Names with wildcards: ``*`` stands for any text, dots included, ``?`` for one character. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

_WILDCARDS = re.compile(r"[*?]")


def num_wildcards(pattern: str) -> int:
    """How many texts ``match_name`` would find."""
    return len(_WILDCARDS.findall(pattern))


def match_name(pattern: str, name: str) -> tuple[str, ...] | None:
    """What each wildcard stood for, in order; None if ``name`` does not match as a whole."""
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groups()


def fill_name(pattern: str, texts: tuple[str, ...]) -> str:
    """``pattern`` with its wildcards replaced in order; ``texts`` has at least as many."""
    remaining = iter(texts)
    return _WILDCARDS.sub(lambda _: next(remaining), pattern)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    groups = {"*": "(.*)", "?": "(.)"}
    return re.compile("".join(groups.get(character, re.escape(character)) for character in pattern), re.DOTALL)
