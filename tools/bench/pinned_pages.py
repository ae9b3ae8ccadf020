"""Pages that drivers have pinned, as the kernel counts them, on the whole machine: what registering leaves behind."""

from __future__ import annotations

import time
from pathlib import Path

_COUNTERS = Path("/proc/vmstat")
_REFRESH = Path("/proc/sys/vm/stat_refresh")
#: What every processor has counted by itself is added up once a second; twice that, and it has been.
_ADDED_UP_AFTER_S = 2.5
_QUIET_S, _QUIET_WITHIN_S = 0.1, 10.0


def pinned_pages() -> int | None:
    """Pages pinned and not unpinned since; exact, where nobody pins meanwhile. None: this kernel does not count them.

    Blocks: for milliseconds where this process is root's, which may have the count brought up to date, else for 2.5 s.
    """
    if "nr_foll_pin_acquired" not in _COUNTERS.read_text():
        return None
    _add_up()
    counters = dict(line.split() for line in _COUNTERS.read_text().splitlines())
    return int(counters["nr_foll_pin_acquired"]) - int(counters["nr_foll_pin_released"])


def quiet_pinned_pages() -> int | None:
    """`pinned_pages` once it stays the same: what has ended is then given back. Blocks.

    :raises TimeoutError: if it goes on changing, because others pin and unpin.
    """
    found, deadline = pinned_pages(), time.monotonic() + _QUIET_WITHIN_S
    while time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        before, found = found, pinned_pages()
        if found == before:
            return found
    raise TimeoutError(f"the number of pinned pages did not stay the same within {_QUIET_WITHIN_S:g} s")


def _add_up() -> None:
    try:
        _REFRESH.write_text("1")
    except OSError:
        time.sleep(_ADDED_UP_AFTER_S)
