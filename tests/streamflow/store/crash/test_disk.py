"""The model of a stopped machine allows what may happen, and nothing that a sync rules out."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

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
    Unsynced,
    changed,
    renamed,
    tree_of,
)


def states(*operations: Operation) -> set[Tree]:
    """What a new disk may hold after these."""
    unsynced = Unsynced({ROOT: Folder({}, 0o755)})
    for operation in operations:
        unsynced.add(operation)
    return {tree_of(state.disk) for state in unsynced.states(lambda path: True, random.Random(0))}


def folder(**files: bytes) -> Tree:
    return ("folder", 0o755, tuple((name, ("file", 0o600, data)) for name, data in sorted(files.items())))


NEW = Make(1, False, 0o600)
NAMED = Name(ROOT, "a", 1)


def test_a_name_may_be_there_before_the_bytes_and_without_them() -> None:
    assert states(NEW, Data(1, 0, b"wxyz"), NAMED) == {folder(), folder(a=b""), folder(a=b"wx"), folder(a=b"wxyz")}


def test_synced_bytes_are_there_if_the_name_is() -> None:
    assert states(NEW, Data(1, 0, b"wxyz"), Sync(1), NAMED) == {folder(), folder(a=b"wxyz")}
    assert states(NEW, Data(1, 0, b"wxyz"), Sync(1), NAMED, Sync(ROOT)) == {folder(a=b"wxyz")}


def test_writes_reach_the_disk_in_no_order() -> None:
    found = states(NEW, NAMED, Sync(ROOT), Size(1, 3), Data(1, 0, b"x"), Data(1, 2, b"y"))
    assert {b"\0\0\0", b"x", b"\0\0y", b"x\0y"} <= {tree[2][0][1][2] for tree in found}


def test_names_of_one_folder_come_in_order_and_those_of_two_do_not() -> None:
    second = (Make(2, False, 0o600), Name(ROOT, "b", 2))
    assert states(NEW, NAMED, *second) == {folder(), folder(a=b""), folder(a=b"", b=b"")}
    sub = (Make(3, True, 0o755), Name(ROOT, "sub", 3), Sync(ROOT))
    moved = states(*sub, NEW, NAMED, Sync(ROOT), Name(3, "b", 1), Name(ROOT, "a", None))
    assert len(moved) == 4, "in neither, in both, and in either"


def test_modes_are_kept_or_not() -> None:
    found = states(NEW, NAMED, Sync(ROOT), Mode(1, 0o444))
    assert {tree[2][0][1][1] for tree in found} == {0o600, 0o444}


def operations() -> st.SearchStrategy[list[Operation]]:
    """Operations on three files in two folders."""
    inode, name = st.sampled_from([2, 3, 4]), st.sampled_from("abc")
    given_or_taken = st.one_of(st.none(), inode)
    one = st.one_of(
        st.builds(Data, inode, st.integers(0, 4), st.binary(min_size=1, max_size=3)),
        st.builds(Size, inode, st.integers(0, 6)),
        st.builds(Mode, inode, st.sampled_from([0o400, 0o640])),
        st.builds(Name, st.sampled_from([ROOT, 1]), name, given_or_taken),
        st.builds(Sync, st.integers(0, 4)),
    )
    return st.lists(one, max_size=8)


def start() -> Disk:
    files: Disk = {inode: File(b"", 0o600) for inode in (2, 3, 4)}
    return {ROOT: Folder({"sub": 1}, 0o755), 1: Folder({}, 0o755), **files}


@given(operations())
def test_everything_and_what_is_certain_are_always_among_the_states(asked: list[Operation]) -> None:
    unsynced, live = Unsynced(start()), start()
    for operation in asked:
        unsynced.add(operation)
        if isinstance(operation, Name):
            live[operation.folder] = renamed(live[operation.folder], [operation])
        elif not isinstance(operation, (Sync, Make)):
            live[operation.inode] = changed(live[operation.inode], operation)
    found = {tree_of(state.disk) for state in unsynced.states(lambda path: True, random.Random(0))}
    assert tree_of(live) in found
    for inode in range(5):
        unsynced.add(Sync(inode))
    assert [tree_of(state.disk) for state in unsynced.states(lambda path: True, random.Random(0))] == [tree_of(live)]
