"""A store of tiny entries, and file operations that are seen one by one. Nothing here imports torch or pytest."""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs

from streamflow.stages.threads import open_threads
from streamflow.store.draft import Draft, StoredImage, StoredTensor
from streamflow.store.files import FileOperations
from streamflow.store.lease import Lease
from streamflow.store.options import StoreOptions, Verification
from streamflow.store.store import HostWeightStore, open_store

SOURCE = "source"
#: One file for each image.
MAX_FILE_BYTES = 1
#: A hole at the end of each image.
_HOLE = 16


@attrs.frozen
class Tiny:
    """A model of a few hundred bytes."""

    images: tuple[StoredImage, ...]
    data: tuple[bytes, ...]

    def draft(self) -> Draft:
        def read(image: int, target: memoryview, start: int) -> None:
            target[:] = self.data[image][start : start + target.nbytes]

        return Draft(self.images, read, {})

    def is_in(self, lease: Lease) -> bool:
        """Whether the leased entry is this model, to the last byte."""
        if tuple(stored.image for stored in lease.manifest.images) != self.images:
            return False
        return all(self._read(lease, image) == data for image, data in enumerate(self.data))

    def _read(self, lease: Lease, image: int) -> bytes:
        found = bytearray(len(self.data[image]))
        lease.fill(image, memoryview(found), 0)
        return bytes(found)


def tiny(seed: int = 0, sizes: tuple[int, ...] = (512, 768)) -> Tiny:
    """A model with one image of each size, in bytes."""
    source = random.Random(seed)
    images = [
        StoredImage(f"block.{index}", "block", nbytes, (_tensor(f"block.{index}.weight", nbytes - _HOLE),))
        for index, nbytes in enumerate(sizes)
    ]
    return Tiny(tuple(images), tuple(source.randbytes(nbytes - _HOLE) + bytes(_HOLE) for nbytes in sizes))


def _tensor(name: str, nbytes: int) -> StoredTensor:
    return StoredTensor(name, "parameter", "uint8", (nbytes,), (1,), 0)


@asynccontextmanager
async def opened(
    root: Path, files: FileOperations | None = None, verification: Verification = "digest", **changes: Any
) -> AsyncIterator[HostWeightStore]:
    """A store that leaves the disk's fill level out of it, gives up soon, and does one thing after the other."""
    given: dict[str, Any] = {
        "free_space_headroom_bytes": 0,
        "free_space_headroom_fraction": 0.0,
        "publication_wait_s": 20.0,
        "lock_wait_s": 5.0,
        "num_threads": 1,
        "max_file_bytes": MAX_FILE_BYTES,
    }
    options = StoreOptions(root=str(root), verification=verification, **{**given, **changes})
    async with open_threads() as crew, open_store(options, crew, files=files or Quick()) as store:
        yield store


async def publish_source(store: HostWeightStore, model: Tiny, source_id: str = SOURCE) -> Lease:
    """The entry of the source, found or published. For the caller to close."""
    return (await find_or_publish(store, model, source_id))[0]


async def find_or_publish(store: HostWeightStore, model: Tiny, source_id: str = SOURCE) -> tuple[Lease, bool]:
    """What an opening does: the entry of the source, and whether it was published here. For the caller to close."""
    if (lease := await _find(store, source_id)) is not None:
        return lease, False
    async with store.publication_lock(source_id):
        if (lease := await _find(store, source_id)) is not None:
            return lease, False
        published = await store.publish(model.draft(), source_id=source_id)
    lease = await store.lease(published.content_id)
    assert lease is not None, "what was just published is not there"
    return lease, True


async def _find(store: HostWeightStore, source_id: str) -> Lease | None:
    content_id = await store.content_of(source_id)
    return None if content_id is None else await store.lease(content_id)


class Quick(FileOperations):
    """The system's operations, but for waiting until the disk has everything: no machine breaks down in a test."""

    def fsync(self, fd: int) -> None:
        os.fstat(fd)


#: Every operation that changes the disk or a lock. Opening counts where it makes the file.
CHANGING = (
    *("open", "pwrite", "fallocate", "fsync", "fchmod", "touch", "mkdir"),
    *("rename", "unlink", "rmdir", "flock", "free_bytes"),
)


class Stepped(Quick):
    """Calls ``before(number, operation, arguments)`` ahead of each changing operation, counted from 0."""

    def __init__(self, before: Callable[[int, str, tuple[Any, ...]], object]) -> None:
        self.before = before
        self.count = 0

    def step(self, operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "open" and not arguments[1] & os.O_CREAT:
            return
        number, self.count = self.count, self.count + 1
        self.before(number, operation, arguments)


def _stepped(operation: str) -> Callable[..., Any]:
    original = getattr(Quick, operation)

    def run(self: Stepped, *arguments: Any) -> Any:
        self.step(operation, arguments)
        return original(self, *arguments)

    return run


for _operation in CHANGING:
    setattr(Stepped, _operation, _stepped(_operation))


def unfinished(root: Path) -> list[str]:
    """What is left in ``tmp/``."""
    return sorted(os.listdir(root / "tmp"))


def locked_files(root: Path) -> list[str]:
    """Every lock file and lease of the store that somebody holds."""
    held = []
    for path in (*root.glob("locks/*"), *root.glob("entries/*/*/lease")):
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(str(path.relative_to(root)))
        finally:
            os.close(fd)
    return sorted(held)


def flip_a_byte(root: Path) -> None:
    """Damage an image of every generation that is in place, in a way that only its digest shows."""
    for path in root.glob("entries/*/*/*.safetensors"):
        path.chmod(0o644)
        with open(path, "r+b") as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-100, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        path.chmod(0o444)
