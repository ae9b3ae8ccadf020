"""What the kernel says of this process's memory."""

from __future__ import annotations

from pathlib import Path

_KILO = 1024


def proportional_bytes() -> int:
    """This process's memory, shared pages by their share (PSS)."""
    return _rolled_up("Pss")


def private_bytes() -> int:
    """This process's memory that no other one has, files that it alone has mapped included."""
    return _rolled_up("Private_Clean") + _rolled_up("Private_Dirty")


def _rolled_up(kind: str) -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * _KILO
    raise OSError(f"/proc/self/smaps_rollup has no line for {kind}")


def mapping_kinds(part_of_name: str) -> dict[str, int]:
    """Bytes by kind (``Rss``, ``Private_Dirty``, ``Anonymous``, ...), summed over the mappings of files named so."""
    kinds: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            inside = len(fields) > 5 and part_of_name in Path(fields[5]).name
        elif inside and fields[-1] == "kB":
            name = fields[0].removesuffix(":")
            kinds[name] = kinds.get(name, 0) + int(fields[1]) * _KILO
    return kinds
