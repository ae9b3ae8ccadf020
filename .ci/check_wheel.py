"""Checks what is inside the built archives: ``check_wheel.py TREE WHEEL_FROM_SDIST WHEEL_FROM_TREE SDIST``."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath


def wheel_contents(wheel: Path) -> dict[str, int]:
    """Every file of the package in a wheel with the CRC of its bytes, metadata left out."""
    with zipfile.ZipFile(wheel) as archive:
        infos = [info for info in archive.infolist() if not info.is_dir()]
    return {info.filename: info.CRC for info in infos if ".dist-info/" not in info.filename}


def expected_files(tree: Path) -> set[str]:
    """What has to be in the wheel: every module of the three folders, the type marker and the demo's data."""
    files = {"streamflow/py.typed"}
    for folder, prefix in (("streamflow", ""), ("stages", "streamflow/"), ("tools", "streamflow/")):
        files |= {prefix + path.relative_to(tree).as_posix() for path in (tree / folder).rglob("*.py")}
    pages = [tree / "tools/trace/page.html"]
    wanted = [*(tree / "tools/demo/data").iterdir(), *pages]
    data = {"streamflow/" + path.relative_to(tree).as_posix() for path in wanted}
    return files | data


def problems(tree: Path, from_sdist: Path, from_tree: Path, sdist: Path) -> list[str]:
    """Everything that is wrong with the archives, in words."""
    found = []
    contents = wheel_contents(from_sdist)
    expected = expected_files(tree)
    if missing := sorted(expected - contents.keys()):
        found.append(f"the wheel lacks {missing}")
    if extra := sorted(contents.keys() - expected):
        found.append(f"the wheel holds files that nobody asked for: {extra}")
    top = {PurePosixPath(name).parts[0] for name in contents}
    if top != {"streamflow"}:
        found.append(f"the wheel installs the top-level names {sorted(top)}, and must install only streamflow")
    if contents != wheel_contents(from_tree):
        found.append("the wheel built from the sdist differs from the one built from the tree")
    with tarfile.open(sdist) as archive:
        if links := [member.name for member in archive.getmembers() if member.issym() or member.islnk()]:
            found.append(f"the sdist holds links, which not every unpacker makes: {links}")
    return found


if __name__ == "__main__":
    wrong = problems(*map(Path, sys.argv[1:5]))
    print("\n".join(wrong) or "the archives hold what they should")
    sys.exit(bool(wrong))
