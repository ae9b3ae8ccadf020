"""An open file: reads, the mapping, what happens when the file changes, and closing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from streamflow.stages.errors import SourceReadError
from streamflow.weights.checkpoint_file import CheckpointFile, open_checkpoint_file
from streamflow.weights.errors import (
    CheckpointClosedError,
    CheckpointFormatError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CheckpointOpenError,
)
from streamflow.weights.safetensors_dtypes import TORCH_TO_FILE
from streamflow.weights.tensor_reading import read_tensor, view_bytes

Save = Callable[..., Path]


@pytest.fixture
def path(save: Save) -> Path:
    return save({"a": torch.arange(1000, dtype=torch.int32), "b": torch.ones(7, dtype=torch.bfloat16)})


def pread(file: CheckpointFile, offset: int, nbytes: int) -> bytes:
    memory = (ctypes.c_ubyte * max(nbytes, 1))()
    file.pread_into(ctypes.addressof(memory), offset, nbytes)
    return bytes(memory)[:nbytes]


def test_an_open_file_tells_what_it_holds(path: Path) -> None:
    with open_checkpoint_file(path) as file:
        assert set(file.header.entries) == {"a", "b"}
        assert file.file_bytes == file.status.st_size == path.stat().st_size
        assert repr(file) == f"<CheckpointFile {str(path)!r} open, 2 tensors, {file.file_bytes:,} bytes>"
        file.map()
        assert "mapped" in repr(file)
    assert file.closed
    assert "closed" in repr(file)


def test_programs_that_are_started_do_not_inherit_the_file(path: Path) -> None:
    with open_checkpoint_file(path):
        (fd,) = {fd for fd in os.listdir("/proc/self/fd") if _stands_for(fd, path)}
        assert fcntl.fcntl(int(fd), fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def _stands_for(fd: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except FileNotFoundError:
        return False


def test_any_range_is_read_exactly(path: Path) -> None:
    data = path.read_bytes()
    with open_checkpoint_file(path) as file:
        for offset, nbytes in [(0, len(data)), (8, 1), (len(data) - 3, 3), (100, 1001), (len(data), 0)]:
            assert pread(file, offset, nbytes) == data[offset : offset + nbytes]
            assert file.read_bytes(offset, nbytes) == data[offset : offset + nbytes]


def test_a_read_touches_only_the_bytes_it_was_given(path: Path) -> None:
    memory = (ctypes.c_ubyte * 30)(*[7] * 30)
    with open_checkpoint_file(path) as file:
        file.pread_into(ctypes.addressof(memory) + 10, 0, 10)
    assert bytes(memory[:10]) == bytes(memory[20:]) == b"\7" * 10
    assert bytes(memory[10:20]) == path.read_bytes()[:10]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, -1), (0, 10**6), (10**6, 0)])
def test_a_range_outside_the_file_is_refused(path: Path, offset: int, nbytes: int) -> None:
    with open_checkpoint_file(path) as file:
        for read in (lambda *range_: pread(file, *range_), file.read_bytes, file.map().memory, file.map().buffer):
            with pytest.raises(ValueError, match="are not inside its"):
                read(offset, nbytes)


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    preadv = os.preadv

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return preadv(fd, [buffers[0][:7]], offset)

    with open_checkpoint_file(path) as file:
        monkeypatch.setattr(os, "preadv", short)
        assert pread(file, 5, 100) == path.read_bytes()[5:105]
    assert calls == 15


def test_a_failing_disk_is_a_typed_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_checkpoint_file(path) as file:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(SourceReadError, match=r"0 of 9 bytes at offset 8 .*Input/output error") as caught:
            pread(file, 8, 9)
        assert (caught.value.source, caught.value.offset, caught.value.wanted) == (str(path), 8, 9)


def test_a_file_that_shrinks_while_it_is_open_is_a_typed_error(path: Path) -> None:
    size = path.stat().st_size
    with open_checkpoint_file(path) as file:
        entry = file.header.entries["a"]
        os.truncate(path, entry.offset_bytes + 100)
        shrank = f"the file shrank from {size:,} to {entry.offset_bytes + 100:,} bytes"
        with pytest.raises(SourceReadError, match=f"100 of 4000 bytes .*{shrank}"):
            read_tensor(file, entry)
        with pytest.raises(SourceReadError, match=r"greater than file size"):
            file.map()
        assert pread(file, entry.offset_bytes, 100) == torch.arange(25, dtype=torch.int32).numpy().tobytes()


def test_a_file_that_grows_is_still_read(path: Path) -> None:
    with open_checkpoint_file(path) as file:
        with path.open("ab") as more:
            more.write(b"more")
        assert torch.equal(read_tensor(file, file.header.entries["b"]), torch.ones(7, dtype=torch.bfloat16))
    with pytest.raises(CheckpointFormatError, match="4 extra bytes follow"):
        open_checkpoint_file(path)


def test_a_file_truncated_before_it_is_opened_says_how_much_is_missing(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 14)
    with pytest.raises(CheckpointFormatError, match="14 bytes are missing at the end; copy or download it again"):
        open_checkpoint_file(path)


def test_a_failed_opening_leaves_no_file_open(
    tmp_path: Path, write_raw: Callable[..., Path], open_fds: Callable[[], set[str]]
) -> None:
    broken = write_raw({"a": 1})
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointFormatError, match=r"hand-made\.safetensors: tensor 'a'"):
        open_checkpoint_file(broken)
    with pytest.raises(CheckpointNotFoundError, match="there is no such file") as missing:
        open_checkpoint_file(tmp_path / "missing")
    assert isinstance(missing.value, FileNotFoundError)
    for name in ("directory", "pipe"):
        with pytest.raises(CheckpointOpenError, match=f"{name}: not a regular file"):
            open_checkpoint_file(tmp_path / name)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(CheckpointOpenError, match="it cannot be opened"):
        open_checkpoint_file(loop)
    assert not any(target.startswith(str(tmp_path)) for target in open_fds())


def test_links_are_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    with open_checkpoint_file(link) as file:
        assert file.file_bytes == path.stat().st_size


def test_closing_twice_is_fine_and_using_a_closed_file_is_a_typed_error(path: Path) -> None:
    file = open_checkpoint_file(path)
    mapping = file.map()
    file.close()
    file.close()
    assert mapping.closed
    for use in (
        lambda: pread(file, 0, 1),
        lambda: pread(file, 0, 0),
        lambda: file.read_bytes(0, 1),
        file.map,
        lambda: view_bytes(file, 0, 1),
        lambda: mapping.memory(0, 1),
        lambda: mapping.address,
    ):
        with pytest.raises(CheckpointClosedError, match="is closed; open the checkpoint again"):
            use()


def test_a_file_that_its_owner_forgot_is_closed_with_a_warning(path: Path, open_fds: Callable[[], set[str]]) -> None:
    file = open_checkpoint_file(path)
    assert str(path) in open_fds()
    forgotten = [file]
    del file
    with pytest.warns(ResourceWarning, match="unclosed file"):
        forgotten.clear()
    assert str(path) not in open_fds()


def test_closing_under_a_read_is_refused_and_then_works(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        inside.set()
        assert go_on.wait(30)
        return preadv(fd, list(buffers), offset)

    file = open_checkpoint_file(path)
    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(pread, file, 0, 10)
        assert inside.wait(30)
        with pytest.raises(CheckpointInUseError, match="1 reads of it are under way"):
            file.close()
        go_on.set()
        assert reading.result() == path.read_bytes()[:10]
    file.close()
    assert file.closed


def test_many_threads_read_at_once(path: Path) -> None:
    data = path.read_bytes()
    with open_checkpoint_file(path) as file, ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda offset: pread(file, offset, 17), range(0, len(data) - 17, 5))
        assert list(parts) == [data[offset : offset + 17] for offset in range(0, len(data) - 17, 5)]


# the mapping


def test_the_mapping_shares_the_pages_of_the_file(path: Path) -> None:
    with open_checkpoint_file(path) as file:
        mapping = file.map()
        assert file.map() is mapping
        assert bytes(mapping.memory(0, file.file_bytes)) == path.read_bytes()
        line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path)))
        place, permissions = line.split()[:2]
        assert permissions == "r--s"
        assert int(place.split("-")[0], 16) == mapping.address


def test_a_view_is_the_mapping_itself_and_makes_no_noise(path: Path) -> None:
    with open_checkpoint_file(path) as file:
        view = view_bytes(file, 9, 40)  # torch's warning about read-only buffers would be an error here
        assert view.dtype == torch.uint8
        assert view.data_ptr() == file.map().address + 9
        assert bytes(view.tolist()) == path.read_bytes()[9:49]
        assert view_bytes(file, 9, 0).shape == (0,)
        del view


def test_closing_under_live_views_is_refused_until_the_last_one_is_gone(path: Path) -> None:
    file = open_checkpoint_file(path)
    view = view_bytes(file, 0, 100)
    part, memory = view[10:20].view(torch.int16), file.map().memory(0, 4)
    del view
    for _ in range(2):
        with pytest.raises(CheckpointInUseError, match="views of its mapping are alive") as caught:
            file.close()
        assert isinstance(caught.value, BufferError)
    assert not file.closed
    assert pread(file, 0, 20) == path.read_bytes()[:20]
    assert part.view(torch.uint8).tolist() == list(path.read_bytes()[10:20])
    memory.release()
    with pytest.raises(CheckpointInUseError):
        file.close()
    del part
    file.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_writing_to_the_mapped_memory_is_an_error_and_not_a_signal(path: Path) -> None:
    with open_checkpoint_file(path) as file:
        memory = file.map().memory(0, 10)
        assert memory.readonly
        with pytest.raises(TypeError, match="read-only"):
            memory[0] = 1
        memory.release()
        tensor = read_tensor(file, file.header.entries["a"])
        tensor.add_(1)  # what models and users get is their own
        assert torch.equal(read_tensor(file, file.header.entries["a"]), tensor - 1)


@pytest.mark.parametrize("dtype", sorted(dtype for dtype in TORCH_TO_FILE if hasattr(torch, dtype)))
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 3)])
def test_tensors_of_every_dtype_are_read_bit_by_bit(
    dtype: str, shape: tuple[int, ...], write_raw: Callable[..., Path]
) -> None:
    kind = getattr(torch, dtype)
    shape = shape or ((2,) if dtype == "float4_e2m1fn_x2" else ())
    packed = 2 if dtype == "float4_e2m1fn_x2" else 1
    stored = [*shape[:-1], shape[-1] * packed] if shape else []
    nbytes = torch.Size(shape).numel() * kind.itemsize
    bits = bytes((37 * i + 1) % 256 for i in range(nbytes))
    # one byte before it, so that the tensor lies unaligned in the file
    path = write_raw(
        {
            "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "t": {"dtype": TORCH_TO_FILE[dtype], "shape": stored, "data_offsets": [1, 1 + nbytes]},
        },
        b"x" + bits,
    )
    with open_checkpoint_file(path) as file:
        tensor = read_tensor(file, file.header.entries["t"])
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (kind, shape, True)
    assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == bits


def test_reading_ignores_the_default_device_and_dtype(path: Path) -> None:
    with open_checkpoint_file(path) as file, torch.device("meta"):
        assert read_tensor(file, file.header.entries["b"]).device.type == "cpu"
        assert view_bytes(file, 0, 0).device.type == "cpu"
        view = view_bytes(file, 0, 8)
        assert view.device.type == "cpu"
        del view
