"""JSON of which every digest is made: the same values have the same text. Pure."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any, *, infinities: bool = False) -> bytes:
    """The one way in which ``value`` is written: ASCII, keys sorted, no spaces.

    ``infinities``: also numbers that are not finite, which JSON has not: for what is compared, and never read back.

    :raises ValueError: if ``value`` holds such a number, and must not.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=infinities).encode("ascii")
