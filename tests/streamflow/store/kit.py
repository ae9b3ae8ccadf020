"""Small drafts, stores, and file operations that fail; what the tests of the store share."""

from __future__ import annotations

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
from streamflow.store.options import StoreOptions
from streamflow.store.store import HostWeightStore, open_store

#: Every operation by which the store changes a disk.
WRITING = ("open", "pwrite", "fallocate", "fsync", "fchmod", "mkdir", "rename", "unlink", "rmdir")


def options(root: Path | str, **changes: Any) -> StoreOptions:
    """Options that leave the disk's fill level out of it and are quick to give up."""
    quick: dict[str, Any] = {
        "free_space_headroom_bytes": 0,
        "free_space_headroom_fraction": 0.0,
        "publication_wait_s": 30.0,
        "lock_wait_s": 5.0,
        "num_threads": 2,
    }
    return StoreOptions(root=str(root), **{**quick, **changes})


@asynccontextmanager
async def opened(
    root: Path | str, files: FileOperations | None = None, **changes: Any
) -> AsyncIterator[HostWeightStore]:
    """A store with threads of its own."""
    async with (
        open_threads() as crew,
        open_store(options(root, **changes), crew, files=files or FileOperations()) as store,
    ):
        yield store


@attrs.define
class Model:
    """Images with random bytes in memory; ``data`` may be changed."""

    images: tuple[StoredImage, ...]
    data: list[bytearray]

    def read(self, image: int, target: memoryview, start: int) -> None:
        target[:] = memoryview(self.data[image])[start : start + target.nbytes]

    def draft(self, **metadata: Any) -> Draft:
        return Draft(self.images, self.read, metadata)


def model(seed: int = 0, image_bytes: tuple[int, ...] = (3 << 10, 70 << 10, 512)) -> Model:
    """Each image holds two tensors with a hole between them and one at the end, the second under two names."""
    source = random.Random(seed)
    images, data = [], []
    for index, nbytes in enumerate(image_bytes):
        half, rows = nbytes // 2, nbytes // 8 - 8
        tensors = (
            StoredTensor(f"block.{index}.a", "parameter", "uint8", (half - 16,), (1,), 0),
            StoredTensor(f"block.{index}.b", "buffer", "bfloat16", (rows, 2), (1, rows), half, (f"tied.{index}",)),
        )
        images.append(StoredImage(f"block.{index}", "block", nbytes, tensors))
        image = bytearray(source.randbytes(nbytes))
        image[half - 16 : half] = bytes(16)
        image[half + rows * 4 :] = bytes(nbytes - half - rows * 4)
        data.append(image)
    return Model(tuple(images), data)


async def publish(root: Path | str, seed: int = 0, **changes: Any) -> str:
    """The content id of a model that was just published."""
    async with opened(root, **changes) as store:
        return (await store.publish(model(seed).draft(), source_id=f"source-{seed}")).content_id


class Scripted(FileOperations):
    """Calls ``before(number, operation, arguments)`` before each disk-changing operation, counted from 0."""

    def __init__(self, before: Callable[[int, str, tuple[Any, ...]], None]) -> None:
        self.before = before
        self.count = 0

    def _step(self, operation: str, *arguments: Any) -> None:
        number, self.count = self.count, self.count + 1
        self.before(number, operation, arguments)


def _scripted(operation: str) -> Callable[..., Any]:
    def run(self: Scripted, *arguments: Any) -> Any:
        self._step(operation, *arguments)
        return getattr(FileOperations, operation)(self, *arguments)

    return run


for _operation in WRITING:
    setattr(Scripted, _operation, _scripted(_operation))


def failing_at(number: int, code: int) -> Scripted:
    """The operation of this number, and every ``pwrite`` and ``fallocate`` after it, fails with this errno."""

    def before(found: int, operation: str, arguments: tuple[Any, ...]) -> None:
        if found == number or (found > number and operation in ("pwrite", "fallocate")):
            raise OSError(code, os.strerror(code))

    return Scripted(before)


def tree(root: Path) -> set[str]:
    """Every file and folder below ``root``, relative."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def unfinished(root: Path) -> list[str]:
    """What is left in ``tmp/``."""
    return sorted(os.listdir(root / "tmp"))
