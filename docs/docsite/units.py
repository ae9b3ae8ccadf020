"""The unit of a number, by its name: names say it in this code base."""

from __future__ import annotations

#: What the end of a name says.
BY_ENDING = {
    "_bytes": "bytes",
    "_s": "seconds",
    "_blocks": "blocks",
    "_threads": "threads",
    "_requests": "requests",
    "_events": "events",
    "_per_walk": "passes",
    "_mode": "permission bits",
    "_fraction": "share, from 0 to 1",
    "_size": "ranks",
    "_degree": "ranks",
    "_rank": "rank, from 0",
}
#: Names that are their own words for what they count.
BY_NAME = {
    "size": "pixels",
    "steps": "denoising steps",
    "aspect_ratio": "width over height",
    "guidance": "guidance scale",
    "lora_scale": "factor",
}


def unit_of(name: str) -> str | None:
    """The unit in which the number called ``name`` is given; None: its name does not say."""
    by_ending = (unit for ending, unit in BY_ENDING.items() if name.endswith(ending))
    return BY_NAME.get(name) or next(by_ending, None)
