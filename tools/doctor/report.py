"""A diagnosis for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamflow.tools.doctor.values import DeviceFinding, Diagnosis, LimitsFinding, StoreFinding
from streamflow.tools.terminal import fact_table, format_bytes, plain_table


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """What was found, and then what would be chosen."""
    facts = fact_table()
    versions = diagnosis.environment
    facts.add_row("versions", f"streamflow {versions['streamflow']}, torch {versions['torch']}")
    for name, text in (
        *_device(diagnosis.device),
        *_limits(diagnosis.limits),
        *_store(diagnosis.store),
    ):
        facts.add_row(name, text)
    console.print(facts)
    console.print()
    console.print(_transfers(diagnosis))


def _device(found: DeviceFinding) -> Iterator[tuple[str, str]]:
    memory = "" if found.memory_bytes is None else f", {format_bytes(found.memory_bytes)}"
    yield "device", found.device + ("" if found.name is None else f", {found.name}{memory}")
    if found.link_bytes_per_s is not None:
        yield "link, host to device", f"{found.link_bytes_per_s / 1e9:.1f} GB/s from page-locked memory"
    if found.why_not_registered is None:
        yield "registering mapped files", "works: tried in a child process"
    else:
        yield "registering mapped files", f"no: {found.why_not_registered}"


def _limits(found: LimitsFinding) -> Iterator[tuple[str, str]]:
    yield "host memory available", _bytes(found.host_available_bytes)
    yield "of that, in the cgroup", _bytes(found.cgroup_available_bytes, "no limit")
    yield "mapped files could take", _bytes(found.registrable_bytes)
    yield "RLIMIT_MEMLOCK", f"{_bytes(found.memlock_bytes, 'no limit')} (not obeyed by drivers)"


def _store(found: StoreFinding) -> Iterator[tuple[str, str]]:
    yield "store", found.root + ("" if found.exists else " (not there yet)")
    kept = "in memory, gone after a restart" if found.is_memory else "kept on disk"
    yield "its filesystem", f"{found.filesystem} at {found.mount_point or '?'}, {kept}"
    if found.problem is not None:
        yield "", found.problem


def _bytes(nbytes: int | None, none: str = "not told") -> str:
    return none if nbytes is None else format_bytes(nbytes)


def _transfers(diagnosis: Diagnosis) -> Table:
    table = plain_table("source", "transfer", "because", num_left=3, title="What would be chosen")
    for found in diagnosis.transfers:
        table.add_row(found.source, Text(found.transfer, style="bold"), found.reason)
    return table
