"""Files in memory without a name: found by others, sealed against change, gone with the last who has them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import attrs
import pytest

from streamflow.stages.registration.mappings import HostMapping, why_not_registrable
from streamflow.weights.anonymous_file import AnonymousFile
from streamflow.weights.errors import CheckpointInUseError

NBYTES = 5 * mmap.PAGESIZE + 100


@pytest.fixture
def file() -> Iterator[AnonymousFile]:
    made = AnonymousFile.create("streamflow test", NBYTES)
    yield made
    made.close()


def read(file: AnonymousFile, start: int, nbytes: int) -> bytes:
    buffer = ctypes.create_string_buffer(nbytes)
    file.read_into(ctypes.addressof(buffer), start, nbytes)
    return buffer.raw


def write(file: AnonymousFile, start: int, data: bytes) -> None:
    with file.writing(start, len(data)) as address:
        ctypes.memmove(address, data, len(data))


def test_all_who_have_it_see_what_one_writes(file: AnonymousFile) -> None:
    other = AnonymousFile.open_at(file.address)
    write(file, 0, b"first")
    write(other, mmap.PAGESIZE, b"second")
    mapping = other.map()
    assert bytes(mapping.memory(mmap.PAGESIZE, 6)) == read(file, mmap.PAGESIZE, 6) == b"second"
    assert bytes(mapping.memory(0, 6)) == b"first\0"
    mapping.close()
    other.close()


def test_a_sealed_file_cannot_be_changed_by_anybody(file: AnonymousFile) -> None:
    other = AnonymousFile.open_at(file.address)
    write(file, 0, b"kept")
    file.seal()
    assert other.is_sealed
    with pytest.raises(PermissionError), other.writing(0, 4):
        raise AssertionError("it was mapped for writing")
    with pytest.raises(PermissionError):
        os.pwrite(other.fileno(), b"lost", 0)
    other.seal()
    for each in (file, other):
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            os.ftruncate(each.fileno(), 0)
        assert read(each, 0, 4) == b"kept"
    other.close()


def test_its_size_is_sealed_from_the_start(file: AnonymousFile) -> None:
    for nbytes in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(file.fileno(), nbytes)


def test_it_is_not_sealed_while_somebody_may_still_write(file: AnonymousFile) -> None:
    other = AnonymousFile.open_at(file.address)
    with other.writing(0, NBYTES):
        with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
            file.seal()
        assert not file.is_sealed
    file.seal()
    other.close()


def test_a_mapping_is_one_that_may_be_registered_and_outlives_the_file(file: AnonymousFile) -> None:
    write(file, 0, b"bytes")
    file.seal()
    mapping = file.map()
    file.close()
    held = HostMapping(mapping.path, mapping.address, mapping.nbytes)
    with open("/proc/self/maps") as maps:
        assert why_not_registrable(held, maps.read()) is None
    view = mapping.memory(0, 5)
    assert bytes(view) == b"bytes"
    with pytest.raises(CheckpointInUseError):
        mapping.close()
    view.release()
    mapping.close()


@pytest.mark.parametrize("other", [{"inode": 1}, {"device": -1}, {"nbytes": 1}], ids=str)
def test_another_file_in_its_place_is_refused(file: AnonymousFile, other: dict[str, int]) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match="another file"):
        AnonymousFile.open_at(attrs.evolve(file.address, **other))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(fd, NBYTES)
    unsealed = AnonymousFile(fd, NBYTES)
    with pytest.raises(FileNotFoundError, match="another file"):
        AnonymousFile.open_at(unsealed.address)
    unsealed.close()


def test_a_file_that_is_closed_is_not_found(file: AnonymousFile) -> None:
    address = file.address
    file.close()
    file.close()
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        AnonymousFile.open_at(address)
    with pytest.raises(ValueError, match="closed"):
        file.fileno()


@pytest.mark.parametrize("start", [-1, NBYTES])
def test_what_is_outside_of_it_is_refused(file: AnonymousFile, start: int) -> None:
    with pytest.raises(ValueError, match="not inside"):
        read(file, start, 1)
    with pytest.raises(ValueError, match="not inside"), file.writing(start, 1):
        raise AssertionError("it was mapped")


def test_an_empty_one_can_be_mapped_too() -> None:
    file = AnonymousFile.create("streamflow test", 0)
    file.seal()
    file.map().close()
    file.close()


def test_programs_that_are_started_do_not_get_it(file: AnonymousFile) -> None:
    listing = "[os.readlink(fd.path) for fd in os.scandir('/proc/self/fd') if os.path.lexists(fd.path)]"
    program = f"import os; print({listing})"

    def descriptors() -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False).stdout

    assert "pipe" in descriptors()
    assert "memfd" not in descriptors()
    file.seal()
    assert "memfd" not in descriptors()
