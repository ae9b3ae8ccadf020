"""How much host memory may still be used: what the machine has, and what the cgroup allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroups: Path | None = None) -> int | None:
    """Bytes that can be allocated now: the least of the machine's available memory and the cgroups' headroom.

    None where the system tells neither.
    """
    headrooms = [*_machine(meminfo), *_cgroup(cgroups or _CGROUP_V2, "memory.max", "memory.current")]
    if cgroups is None:
        headrooms += _cgroup(_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(headrooms, default=None)


def _machine(meminfo: Path) -> Iterator[int]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup(root: Path, limit_name: str, usage_name: str) -> Iterator[int]:
    limit, usage = _number(root / limit_name), _number(root / usage_name)
    if limit is not None and usage is not None:
        yield max(0, limit - usage + _reclaimable(root))


def _reclaimable(root: Path) -> int:
    """Page cache that the kernel would drop first; it counts as usage."""
    try:
        lines = (root / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", "0")))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
