"""What may be registered, by what the system says of it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from streamflow.stages.registration.mappings import HostMapping, why_not_registrable
from streamflow.weights.file_mapping import FileMapping

MAPS = """\
1000-3000 r--s 00000000 08:01 1 /a
3000-4000 r--s 00002000 08:01 1 /a
4000-5000 rw-p 00000000 00:00 0
5000-6000 r--p 00000000 08:01 2 /b
6000-7000 rw-s 00000000 08:01 3 /c
7000-8000 r--s 00000000 08:01 3 /c
9000-a000 r--s 00000000 08:01 3 /c
"""


@pytest.mark.parametrize(
    ("address", "nbytes", "reason"),
    [
        (0x1000, 0x3000, None),
        (0x1800, 0x10, None),
        (0x9000, 0x1000, None),
        (0x3000, 0x1001, "x is mapped rw-p, and only shared read-only mappings are registered"),
        (0x5000, 0x1000, "x is mapped r--p, and only shared read-only mappings are registered"),
        (0x6000, 0x2000, "x is mapped rw-s, and only shared read-only mappings are registered"),
        (0x7000, 0x3000, "x is not mapped as a whole"),
        (0x0, 0x1000, "x is not mapped as a whole"),
        (0xF000, 0x1000, "x is not mapped as a whole"),
    ],
)
def test_only_what_is_shared_and_read_only_throughout(address: int, nbytes: int, reason: str | None) -> None:
    assert why_not_registrable(HostMapping("x", address, nbytes), MAPS) == reason


def test_the_systems_own_text_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (3 * mmap.PAGESIZE + 5))
    with path.open("rb") as file:
        mapping = FileMapping(str(path), file.fileno(), path.stat().st_size)
    held = HostMapping("file", mapping.address, mapping.nbytes)
    assert why_not_registrable(held, Path("/proc/self/maps").read_text()) is None
    mapping.close()


def test_a_private_writable_mapping_is_told_from_it() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        buffer = ctypes.c_char.from_buffer(pages)
        held = HostMapping("memory", ctypes.addressof(buffer), mmap.PAGESIZE)
        reason = why_not_registrable(held, Path("/proc/self/maps").read_text())
        del buffer
    assert reason == "memory is mapped rw-p, and only shared read-only mappings are registered"
