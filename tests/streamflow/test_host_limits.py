"""Host memory that may still be used, by what the system writes down."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamflow.host_limits import available_host_bytes, cgroup_available_bytes, pinnable_host_bytes

KIB = 1024


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\nCached:   300 kB\n")
    return path


def cgroup(folder: Path, limit: str, usage: int, inactive: int = 0, active: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file {active}\n")
    return folder


def test_the_smaller_of_machine_and_cgroup_counts(meminfo: Path, tmp_path: Path) -> None:
    assert available_host_bytes(meminfo, cgroup(tmp_path / "a", "800000", 300_000)) == 500_000
    assert available_host_bytes(meminfo, cgroup(tmp_path / "b", "9000000", 300_000)) == 1000 * KIB


def test_cache_that_the_kernel_drops_first_is_available_and_all_of_it_for_mapped_files(
    meminfo: Path, tmp_path: Path
) -> None:
    """A file in the page cache counts as usage, and is not to be refused for the room that it takes already."""
    group = cgroup(tmp_path / "a", "800000", 700_000, inactive=100_000, active=400_000)
    assert available_host_bytes(meminfo, group) == cgroup_available_bytes(group) == 200_000
    assert pinnable_host_bytes(meminfo, group) == 600_000


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_none(limit: str, meminfo: Path, tmp_path: Path) -> None:
    group = cgroup(tmp_path / "a", limit, 300_000)
    assert cgroup_available_bytes(group) is None
    assert pinnable_host_bytes(meminfo, group) == 1000 * KIB


def test_over_the_limit_nothing_is_left(meminfo: Path, tmp_path: Path) -> None:
    assert available_host_bytes(meminfo, cgroup(tmp_path / "a", "100", 300)) == 0


def test_a_system_that_does_not_tell_is_none(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path / "none", tmp_path) is None
    assert pinnable_host_bytes(tmp_path / "none", tmp_path) is None
