"""Counters of an engine, as a frozen snapshot."""

from __future__ import annotations

import attrs


@attrs.frozen
class EngineStatistics:
    """What an engine did since it was opened.

    Bytes are in the slot form. ``streamed_bytes`` counts fetches into the window, ``resident_bytes`` the blocks that
    stay. Waits are host time, summed over places; see `WaitTimes`. ``device_peak_bytes`` is what streamflow itself
    allocated at most: window, residents, scratch and what the owner of the engine added, no activations.
    """

    num_walks: int
    num_passes: int
    num_fetches: int
    num_on_demand_fetches: int
    streamed_bytes: int
    resident_bytes: int
    window_bytes: int
    scratch_bytes: int
    staging_bytes: int
    device_in_use_bytes: int
    device_peak_bytes: int
    num_mailbox_waits: int
    mailbox_wait_s: float
    event_wait_s: float
    run_ahead_wait_s: float
    hooks_cpu_s: float
    num_blocks_run: int
    num_slow_device_calls: int
    num_late_messages: int
    num_dropped_events: int

    def since(self, earlier: EngineStatistics | None) -> EngineStatistics:
        """What was done since ``earlier`` (None: since the opening). What is held, and the peak, are as they are."""
        if earlier is None:
            return self
        changes = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTED}
        return attrs.evolve(self, **changes)


#: The fields that only grow.
_COUNTED = (
    "num_walks",
    "num_passes",
    "num_fetches",
    "num_on_demand_fetches",
    "streamed_bytes",
    "num_mailbox_waits",
    "mailbox_wait_s",
    "event_wait_s",
    "run_ahead_wait_s",
    "hooks_cpu_s",
    "num_blocks_run",
    "num_slow_device_calls",
    "num_late_messages",
    "num_dropped_events",
)
