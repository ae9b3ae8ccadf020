"""Nothing of a living owner is removed, and nothing of a dead one stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamflow.store.files import FileOperations
from streamflow.store.paths import StorePaths
from streamflow.store.temporaries import make_file, make_folder, remove_stale, remove_tree, write_file
from tests.streamflow.store.kit import Scripted

FILES = FileOperations()


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    (tmp_path / "tmp").mkdir()
    return StorePaths(str(tmp_path))


def test_what_is_locked_stays_and_what_is_not_goes(paths: StorePaths) -> None:
    living, dead = make_folder(FILES, paths, 0o755), make_folder(FILES, paths, 0o755)
    file, left = make_file(FILES, paths, 0o644), make_file(FILES, paths, 0o644)
    for temporary in (dead, left):
        temporary.descriptor.close()
    Path(dead.path, "weights").touch(0o444)
    os.chmod(dead.path, 0o555)
    remove_stale(FILES, paths)
    assert set(os.listdir(paths.folder("tmp"))) == {os.path.basename(living.path), os.path.basename(file.path)}
    for temporary in (living, file):
        temporary.descriptor.close()
    remove_stale(FILES, paths)
    assert os.listdir(paths.folder("tmp")) == []


@pytest.mark.parametrize("make", [make_folder, make_file])
def test_one_that_is_taken_for_stale_before_it_is_locked_is_made_again(paths: StorePaths, make: object) -> None:
    cleaned = 0

    class Cleaned(FileOperations):
        def flock(self, fd: int, operation: int) -> None:
            nonlocal cleaned
            cleaned += 1
            if cleaned == 1:
                remove_stale(FILES, paths)
            super().flock(fd, operation)

    temporary = make(Cleaned(), paths, 0o755)  # type: ignore[operator]
    with temporary.descriptor:
        assert cleaned == 2
        assert os.listdir(paths.folder("tmp")) == [os.path.basename(temporary.path)]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    for make in (make_folder, make_file):
        with pytest.raises(FileNotFoundError):
            make(FILES, StorePaths(str(tmp_path)), 0o755)


def test_a_file_is_synced_before_it_gets_its_name_and_the_folder_after(paths: StorePaths, tmp_path: Path) -> None:
    steps: list[str] = []
    files = Scripted(lambda number, operation, arguments: steps.append(operation))
    write_file(files, paths, str(tmp_path / "record"), b"data", 0o640)
    assert steps == ["open", "fchmod", "pwrite", "fsync", "rename", "open", "fsync"]
    assert (tmp_path / "record").read_bytes() == b"data"
    assert (tmp_path / "record").stat().st_mode & 0o777 == 0o640


def test_a_file_that_cannot_be_written_leaves_nothing(paths: StorePaths, tmp_path: Path) -> None:
    def fail(number: int, operation: str, arguments: object) -> None:
        if operation == "fsync":
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        write_file(Scripted(fail), paths, str(tmp_path / "record"), b"data", 0o640)
    assert os.listdir(tmp_path) == ["tmp"]
    assert os.listdir(paths.folder("tmp")) == []


def test_short_writes_are_continued(paths: StorePaths, tmp_path: Path) -> None:
    class Short(FileOperations):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return super().pwrite(fd, data[:3], offset)

    write_file(Short(), paths, str(tmp_path / "record"), b"0123456789", 0o640)
    assert (tmp_path / "record").read_bytes() == b"0123456789"


def test_a_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "link").symlink_to(outside)
    (tree / "link").symlink_to(outside / "kept")
    (tree / "sub").chmod(0o555)
    remove_tree(FILES, str(tree))
    remove_tree(FILES, str(tree))
    assert not tree.exists()
    assert (outside / "kept").exists()
