"""What a disk may hold after a machine has stopped: the model by which the store's syncs are judged. Pure.

What the system was asked for reaches the disk in no order, but for this: a sync of a file brings its bytes, size and
mode there, a sync of a folder the names in it and its mode. So after a stop

- of the names that were given or removed in one folder since its last sync, the first ones may be there and the others
  not; a rename between two folders is two of them, and one half may be there without the other;
- of the writes to one file since its last sync, any are there, each wholly, by its first half, or not at all; and so
  for changes of its size and mode;
- a file that is synced may still have no name.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import attrs

Choice = TypeVar("Choice")
ROOT = 0
#: States that are looked at for one moment, at most: beyond, so many are drawn from all.
MANY_STATES = 3000


@attrs.frozen
class Make:
    """A new file or folder, with no name yet."""

    inode: int
    is_folder: bool
    mode: int


@attrs.frozen
class Name:
    """A name in a folder: given to ``inode``, or (None) taken away. ``emptied``: the folder that ends with its name."""

    folder: int
    name: str
    inode: int | None
    emptied: int | None = None


@attrs.frozen
class Data:
    """Bytes written to a file."""

    inode: int
    offset: int
    data: bytes


@attrs.frozen
class Size:
    """A file that has at least this size, zeros where nothing was written."""

    inode: int
    nbytes: int


@attrs.frozen
class Mode:
    """The permissions of a file or folder."""

    inode: int
    mode: int


@attrs.frozen
class Sync:
    """A file or folder that was brought to the disk."""

    inode: int


Change: TypeAlias = Data | Size | Mode
Operation: TypeAlias = Make | Name | Change | Sync


@attrs.frozen
class File:
    data: bytes
    mode: int


@attrs.frozen
class Folder:
    names: Mapping[str, int]
    mode: int


Disk: TypeAlias = dict[int, File | Folder]
#: A file or folder with all that is in it, to be compared: (kind, mode, bytes or named trees).
Tree: TypeAlias = tuple[str, int, "bytes | tuple[tuple[str, Tree], ...]"]


def changed(node: File | Folder, change: Change) -> File | Folder:
    """The file or folder after one change that reached it."""
    if isinstance(change, Mode):
        return attrs.evolve(node, mode=change.mode)
    assert isinstance(node, File)
    if isinstance(change, Size):
        return attrs.evolve(node, data=node.data.ljust(change.nbytes, b"\0"))
    end = change.offset + len(change.data)
    return attrs.evolve(
        node, data=node.data[: change.offset].ljust(change.offset, b"\0") + change.data + node.data[end:]
    )


def renamed(node: File | Folder, names: Sequence[Name]) -> Folder:
    """The folder after these changes to its names."""
    assert isinstance(node, Folder)
    found = dict(node.names)
    for name in names:
        if name.inode is None:
            found.pop(name.name, None)
        else:
            found[name.name] = name.inode
    return attrs.evolve(node, names=found)


def tree_of(disk: Mapping[int, File | Folder], inode: int = ROOT) -> Tree:
    """Everything below a file or folder."""
    node = disk[inode]
    if isinstance(node, File):
        return ("file", node.mode, node.data)
    return ("folder", node.mode, tuple((name, tree_of(disk, node.names[name])) for name in sorted(node.names)))


def reachable(disk: Mapping[int, File | Folder], inode: int = ROOT, path: str = "") -> Iterator[tuple[int, str]]:
    """Every file and folder that has a path, with it; one with two paths comes twice."""
    yield inode, path
    node = disk[inode]
    if isinstance(node, Folder):
        for name, child in node.names.items():
            yield from reachable(disk, child, f"{path}/{name}")


@attrs.frozen
class Stopped:
    """A disk after a stop. ``emptied``: folders that were removed."""

    disk: Disk
    emptied: frozenset[int]

    def misnamed_folder(self, before: Disk) -> str | None:
        """A folder with two names; or with contents and none, though it had one ``before``. None: there is none."""
        named = [inode for inode, _ in reachable(self.disk)]
        for inode, node in self.disk.items():
            if isinstance(node, Folder) and named.count(inode) > 1:
                return f"folder {inode} has two names"
            if isinstance(node, Folder) and node.names and inode in before and inode not in {*named, *self.emptied}:
                return f"folder {inode} with {sorted(node.names)} has no name"
        return None


class Unsynced:
    """What is certainly on the disk, and what may be."""

    def __init__(self, disk: Disk) -> None:
        self._disk = dict(disk)
        self._names: dict[int, list[Name]] = {}
        self._changes: dict[int, list[Change]] = {}

    def add(self, operation: Operation) -> None:
        """One more operation was asked for."""
        if isinstance(operation, Make):
            self._disk[operation.inode] = (
                Folder({}, operation.mode) if operation.is_folder else File(b"", operation.mode)
            )
        elif isinstance(operation, Name):
            self._names.setdefault(operation.folder, []).append(operation)
        elif isinstance(operation, Sync):
            self._sync(operation.inode)
        else:
            self._changes.setdefault(operation.inode, []).append(operation)

    def _sync(self, inode: int) -> None:
        for change in self._changes.pop(inode, []):
            self._disk[inode] = changed(self._disk[inode], change)
        if inode in self._names:
            self._disk[inode] = renamed(self._disk[inode], self._names.pop(inode))

    def states(self, matters: Callable[[str], bool], chance: random.Random) -> Iterator[Stopped]:
        """Every state in which the disk may be if everything stops now.

        Files and folders that have no path that ``matters`` are left as they would be without a stop.
        """
        for named in self._with_names(matters, chance):
            inodes = _where(reachable(named.disk), matters) & self._changes.keys()
            open_ones = sorted(inodes)
            choices = [list(itertools.product(*map(_fates, self._changes[inode]))) for inode in open_ones]
            for kept in _product(choices, chance):
                disk = dict(named.disk)
                for inode, changes in zip(open_ones, kept, strict=True):
                    for change in changes:
                        disk[inode] = changed(disk[inode], change) if change is not None else disk[inode]
                yield attrs.evolve(named, disk=disk)

    def _with_names(self, matters: Callable[[str], bool], chance: random.Random) -> Iterator[Stopped]:
        everything = {folder: len(names) for folder, names in self._names.items()}
        # where something is with all of the changes, and with none of them; what is nowhere may be lost
        places = [*reachable(self._named(everything).disk), *reachable(self._disk)]
        inodes = _where(places, matters) | (self._names.keys() - {inode for inode, _ in places})
        folders = sorted(inodes & self._names.keys())
        for kept in _product([range(everything[folder] + 1) for folder in folders], chance):
            yield self._named(everything | dict(zip(folders, kept, strict=True)))

    def _named(self, kept: Mapping[int, int]) -> Stopped:
        """With so many of each folder's changes of names."""
        disk, emptied = dict(self._disk), set()
        for folder, number in kept.items():
            names = self._names[folder][:number]
            disk[folder] = renamed(disk[folder], names)
            emptied |= {name.emptied for name in names if name.emptied is not None}
        return Stopped(disk, frozenset(emptied))


def _where(found: Iterable[tuple[int, str]], matters: Callable[[str], bool]) -> set[int]:
    return {inode for inode, path in found if matters(path)}


def _fates(change: Change) -> tuple[Change | None, ...]:
    """What may become of a change: nothing, half of it, or all."""
    if isinstance(change, Data) and len(change.data) > 1:
        return (None, attrs.evolve(change, data=change.data[: len(change.data) // 2]), change)
    return (None, change)


def _product(choices: Sequence[Sequence[Choice]], chance: random.Random) -> Iterator[tuple[Choice, ...]]:
    """All combinations; where there are too many, a draw of them that has the first and the last."""
    total = 1
    for options in choices:
        total *= len(options)
    if total <= MANY_STATES:
        yield from itertools.product(*choices)
        return
    yield tuple(options[0] for options in choices)
    yield tuple(options[-1] for options in choices)
    for _ in range(MANY_STATES - 2):
        yield tuple(chance.choice(options) for options in choices)
