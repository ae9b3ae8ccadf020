"""Write down everything that the store asks of the disk, and make disks of what may be left of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from tests.streamflow.store.crash.disk import (
    ROOT,
    Data,
    Disk,
    File,
    Folder,
    Make,
    Mode,
    Name,
    Operation,
    Size,
    Sync,
    Tree,
    changed,
    renamed,
)
from tests.streamflow.store.crash.kit import Quick


class Recorder(Quick):
    """Does what it is asked below ``base``, and keeps a log of it. ``refuse`` may raise ahead of each operation.

    ``before`` is the disk as it was at first, ``live`` as it would be without a stop. For one thread at a time.
    """

    def __init__(self, base: Path, refuse: Callable[[str], object] = lambda operation: None) -> None:
        self.base = base
        self.log: list[Operation] = []
        self.refuse = refuse
        self.before: Disk = {}
        self._scan(base)
        self.live: Disk = dict(self.before)
        self._open: dict[int, int] = {}

    def _scan(self, path: Path) -> int:
        inode = len(self.before)
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_file():
            self.before[inode] = File(path.read_bytes(), mode)
            return inode
        self.before[inode] = Folder({}, mode)
        self.before[inode] = Folder({child.name: self._scan(child) for child in sorted(path.iterdir())}, mode)
        return inode

    def _add(self, operation: Operation) -> None:
        self.log.append(operation)
        if isinstance(operation, Make):
            self.live[operation.inode] = (
                Folder({}, operation.mode) if operation.is_folder else File(b"", operation.mode)
            )
        elif isinstance(operation, Name):
            self.live[operation.folder] = renamed(self.live[operation.folder], [operation])
        elif not isinstance(operation, Sync):
            self.live[operation.inode] = changed(self.live[operation.inode], operation)

    def _find(self, path: str) -> int | None:
        """The file or folder that has this path now."""
        inode: int | None = ROOT
        for name in Path(path).relative_to(self.base).parts:
            node = self.live[inode] if inode is not None else None
            inode = node.names.get(name) if isinstance(node, Folder) else None
        return inode

    def _place(self, path: str) -> tuple[int, str]:
        """The folder of a path, and the name in it."""
        folder = self._find(os.path.dirname(path))
        assert folder is not None, path
        return folder, os.path.basename(path)

    def _make(self, path: str, *, is_folder: bool) -> None:
        inode = max(self.live) + 1
        folder, name = self._place(path)
        self._add(Make(inode, is_folder, stat.S_IMODE(os.lstat(path).st_mode)))
        self._add(Name(folder, name, inode))

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        if flags & os.O_CREAT:
            self.refuse("open")
        fd = super().open(path, flags, mode)
        if Path(path).is_relative_to(self.base) and self._find(path) is None:
            self._make(path, is_folder=False)
        self._open[fd] = self._inode(path)
        return fd

    def _inode(self, path: str) -> int:
        """What has this path; minus one for a folder above all that is recorded."""
        found = self._find(path) if Path(path).is_relative_to(self.base) else -1
        assert found is not None, path
        return found

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self.refuse("pwrite")
        done = super().pwrite(fd, data, offset)
        self._add(Data(self._open[fd], offset, bytes(data[:done])))
        return done

    def fallocate(self, fd: int, nbytes: int) -> None:
        self.refuse("fallocate")
        super().fallocate(fd, nbytes)
        self._add(Size(self._open[fd], nbytes))

    def fsync(self, fd: int) -> None:
        self.refuse("fsync")
        super().fsync(fd)
        if self._open[fd] >= 0:
            self._add(Sync(self._open[fd]))

    def fchmod(self, fd: int, mode: int) -> None:
        self.refuse("fchmod")
        super().fchmod(fd, mode)
        if self.live[self._open[fd]].mode != mode:
            self._add(Mode(self._open[fd], mode))

    def mkdir(self, path: str, mode: int) -> None:
        self.refuse("mkdir")
        super().mkdir(path, mode)
        self._make(path, is_folder=True)

    def rename(self, source: str, target: str) -> None:
        self.refuse("rename")
        inode = self._inode(source)
        super().rename(source, target)
        self._add(Name(*self._place(target), inode))
        self._add(Name(*self._place(source), None))

    def unlink(self, path: str) -> None:
        self.refuse("unlink")
        super().unlink(path)
        self._add(Name(*self._place(path), None))

    def rmdir(self, path: str) -> None:
        self.refuse("rmdir")
        inode = self._inode(path)
        super().rmdir(path)
        self._add(Name(*self._place(path), None, emptied=inode))

    def path_of(self, inode: int) -> str:
        """Where it was in the end, else at first; for messages."""
        for disk in (self.live, self.before):
            for found, path in _paths(disk):
                if found == inode:
                    return path or "/"
        return f"#{inode}"


def _paths(disk: Disk, inode: int = ROOT, path: str = "") -> list[tuple[int, str]]:
    node = disk[inode]
    found = [(inode, path)]
    if isinstance(node, Folder):
        for name, child in node.names.items():
            found += _paths(disk, child, f"{path}/{name}")
    return found


def put(tree: Tree, path: Path) -> None:
    """Make the tree at ``path``, which is not there yet."""
    kind, mode, content = tree
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.mkdir()
        for name, child in content:
            put(child, path / name)
    assert kind in ("file", "folder")
    path.chmod(mode)
