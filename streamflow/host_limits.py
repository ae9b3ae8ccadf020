"""How much host memory may still be used: what the machine has, and what the cgroup allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
#: The older kind of cgroup writes down a number, larger than this, where there is no limit.
_NO_LIMIT = 1 << 62


def available_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroups: Path | None = None) -> int | None:
    """Bytes that can be allocated now: the least of the machine's available memory and the cgroups' headroom.

    None where the system tells neither.
    """
    return _least_headroom(meminfo, cgroups, ("inactive_file",))


def pinnable_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroups: Path | None = None) -> int | None:
    """Bytes of mapped files that can be page-locked now: as `available_host_bytes`, but with all of the page cache.

    Pages that are in the cache already count as used, and need no room a second time.
    """
    return _least_headroom(meminfo, cgroups, ("inactive_file", "active_file"))


def cgroup_available_bytes(cgroups: Path | None = None) -> int | None:
    """Bytes that the cgroup allows to allocate now; None where it sets no limit."""
    return min(_cgroups(cgroups, ("inactive_file",)), default=None)


def _least_headroom(meminfo: Path, cgroups: Path | None, counted: tuple[str, ...]) -> int | None:
    return min((*_machine(meminfo), *_cgroups(cgroups, counted)), default=None)


def _machine(meminfo: Path) -> Iterator[int]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroups(root: Path | None, counted: tuple[str, ...]) -> Iterator[int]:
    yield from _cgroup(root or _CGROUP_V2, "memory.max", "memory.current", counted)
    if root is None:
        yield from _cgroup(_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes", counted)


def _cgroup(root: Path, limit_name: str, usage_name: str, counted: tuple[str, ...]) -> Iterator[int]:
    limit, usage = _number(root / limit_name), _number(root / usage_name)
    if limit is not None and usage is not None and limit < _NO_LIMIT:
        yield max(0, limit - usage + _page_cache(root, counted))


def _page_cache(root: Path, counted: tuple[str, ...]) -> int:
    """Bytes of page cache of the kinds ``counted``, which are in the usage although they need no room of their own."""
    try:
        lines = (root / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    return sum(int(fields.get(kind, fields.get(f"total_{kind}", "0"))) for kind in counted)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
