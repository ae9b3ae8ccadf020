"""Numbers of blocks and windows that show what the whole grid shows."""

from __future__ import annotations

#: Where the number of blocks is a multiple of the window, one more, one less, and where the window holds them all.
CORNERS = [(1, 1), (1, 4), (3, 2), (4, 2), (5, 3), (8, 4), (9, 4)]
