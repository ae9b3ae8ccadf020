"""A trace and torch.profiler's of the same run on one time axis. Pure: no torch, no clock.

The profiler counts microseconds from ``baseTimeNanoseconds`` on the wall clock; ours says where on the wall clock its
zero is. Both clocks are the host's, so the shift is all there is to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamflow.tools.trace.errors import ProfilerTraceError


def with_profile(ours: Mapping[str, Any], profile: Mapping[str, Any], profile_name: str) -> dict[str, Any]:
    """Both traces' events on our time axis; the metadata is ours, and the profiler's is the last under ``profilers``.

    :raises ProfilerTraceError: if ``profile`` does not say where its zero is.
    """
    base = profile.get("baseTimeNanoseconds")
    if not isinstance(base, int) or not isinstance(profile.get("traceEvents"), list):
        raise ProfilerTraceError(profile_name, "it has no baseTimeNanoseconds and traceEvents")
    shift_us = (base - ours["streamflow"]["clock"]["unix_ns_at_zero"]) / 1e3
    theirs = [{**e, "ts": e["ts"] + shift_us} if "ts" in e else e for e in profile["traceEvents"]]
    rest = {name: value for name, value in profile.items() if name != "traceEvents"}
    return {**ours, "profilers": [*ours.get("profilers", ()), rest], "traceEvents": [*ours["traceEvents"], *theirs]}
