"""What the doctor finds. Values only; bytes are bytes, None is "not known" or "no limit" as each says."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class DeviceFinding:
    """The device. ``name``, ``memory_bytes`` and ``link_bytes_per_s`` (host to device, page-locked) are None for a host
    device.

    ``why_not_registered``: what stands against registering mapped files; None if nothing does: it was tried.
    ``probed``: whether a child process tried it, on the filesystem of the store.
    """

    device: str
    is_host: bool
    name: str | None
    memory_bytes: int | None
    link_bytes_per_s: float | None
    why_not_registered: str | None
    probed: bool


@attrs.frozen
class LimitsFinding:
    """Limits on host memory; None: none, or not told.

    ``memlock_bytes`` (soft) is RLIMIT_MEMLOCK: drivers do not obey it, so it decides nothing here.
    """

    memlock_bytes: int | None
    host_available_bytes: int | None
    cgroup_available_bytes: int | None
    registrable_bytes: int | None


@attrs.frozen
class StoreFinding:
    """Where the host weight store would be; ``problem``: why not. ``folder`` is the nearest one that exists."""

    root: str
    exists: bool
    folder: str
    filesystem: str
    mount_point: str
    is_memory: bool
    problem: str | None


@attrs.frozen
class TransferFinding:
    """The transfer that blocks of one source would get, and why."""

    source: str
    transfer: str
    reason: str


@attrs.frozen
class Diagnosis:
    """Everything."""

    environment: dict[str, Any]
    device: DeviceFinding
    limits: LimitsFinding
    store: StoreFinding
    transfers: tuple[TransferFinding, ...]
