"""Which mappings of this process may be registered at all: what the system itself says that they are.

Registering a private, writable mapping never returns on some drivers, so that it is never tried. Pure: no torch, no
clock.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

#: As the system writes it: readable only, shared.
REGISTRABLE = "r--s"


@attrs.frozen(eq=False)
class HostMapping:
    """A file's mapping: ``address`` is where its first byte is; ``keeps`` is what keeps it mapped while it is held."""

    name: str
    address: int
    nbytes: int
    keeps: object = None


def why_not_registrable(mapping: HostMapping, maps: str) -> str | None:
    """Why ``mapping`` is not to be registered, by the text of ``/proc/self/maps``; None if nothing is against it."""
    reached = mapping.address
    for start, end, permissions in _areas(maps):
        if start <= reached < end:
            if permissions != REGISTRABLE:
                return f"{mapping.name} is mapped {permissions}, and only shared read-only mappings are registered"
            reached = end
        if reached >= mapping.address + mapping.nbytes:
            return None
    return f"{mapping.name} is not mapped as a whole"


def _areas(maps: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and permissions of every area, in the order of the text, which is ascending."""
    for line in maps.splitlines():
        bounds, permissions, *_ = line.split(maxsplit=2)
        start, _, end = bounds.partition("-")
        yield int(start, 16), int(end, 16), permissions
