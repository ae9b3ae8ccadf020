"""What a thread is doing with the components of an offload."""

from __future__ import annotations

import threading

from streamflow.stages.passes import Pass
from streamflow.stages.places import Place


class ThreadState(threading.local):
    """The place that the thread works in, and what it is inside of there.

    ``passing`` is the component whose pass is ``current``; ``block`` the block that it is inside of. ``inside`` are the
    components whose calls have not returned, the outermost first; ``leases`` those that are held for the thread.
    """

    place: Place | None = None
    current: Pass | None = None
    passing: str | None = None
    block: int | None = None
    has_entered: bool = False
    inside: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()
