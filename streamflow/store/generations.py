"""Which generations of an entry there are, which may be used, and which number the next one gets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from streamflow.store.paths import StorePaths, generation_of, is_content_id, numbered


def content_ids(paths: StorePaths) -> list[str]:
    """Every content id that has a folder."""
    return sorted(name for name in os.listdir(paths.folder("entries")) if is_content_id(name))


def generations(paths: StorePaths, content_id: str) -> list[int]:
    """The generations that are in place, newest first; denied ones among them."""
    try:
        names = os.listdir(paths.entry(content_id))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((found for name in names if (found := generation_of(name)) is not None), reverse=True)


def next_generation(paths: StorePaths, content_id: str, denied_here: Iterable[int]) -> int:
    """A number above all that this entry has or had: who speaks of an old generation never means a new one."""
    used = [*generations(paths, content_id), *denied_here]
    for folder in ("quarantine", "denied"):
        with suppress(FileNotFoundError):
            pairs = map(numbered, os.listdir(paths.folder(folder)))
            used += [pair[1] for pair in pairs if pair is not None and pair[0] == content_id]
    return max(used, default=0) + 1
