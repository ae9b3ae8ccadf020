"""An open checkpoint: one safetensors file, or the shards that an index lists. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import MappingProxyType, TracebackType

import attrs

from streamflow.weights.checkpoint_choice import FILE_SUFFIX, INDEX_SUFFIX, choose_checkpoint
from streamflow.weights.checkpoint_file import CheckpointFile, open_checkpoint_file
from streamflow.weights.checkpoint_index import MAX_INDEX_BYTES, check_shards, parse_index
from streamflow.weights.errors import CheckpointFormatError, CheckpointNotFoundError, CheckpointOpenError
from streamflow.weights.safetensors_header import TensorEntry

_COMPARE_BYTES = 4 << 20


@attrs.frozen
class CheckpointTensor:
    """One tensor of an open checkpoint: the file that holds it and its place there."""

    file: CheckpointFile
    entry: TensorEntry


@attrs.frozen(eq=False)
class Checkpoint:
    """Open files and their tensors by name; owns the files until ``close``. Made by ``open_checkpoint``.

    ``path`` is the file or index that was chosen.
    """

    path: str
    files: tuple[CheckpointFile, ...]
    tensors: Mapping[str, CheckpointTensor]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Where each tensor is in its file, for code that decides and reads nothing."""
        return {name: tensor.entry for name, tensor in self.tensors.items()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.entry.nbytes for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all files, headers included."""
        return sum(file.file_bytes for file in self.files)

    def same_bytes(self, first: str, second: str) -> bool:
        """Whether two tensors agree in dtype, shape and every byte; reads both. Blocks; for worker threads.

        :raises KeyError: if the checkpoint has no such tensor.
        :raises SourceReadError: if a file shrank or cannot be read.
        """
        a, b = self.tensors[first], self.tensors[second]
        if (a.entry.dtype, a.entry.shape) != (b.entry.dtype, b.entry.shape):
            return False
        for start in range(0, a.entry.nbytes, _COMPARE_BYTES):
            size = min(_COMPARE_BYTES, a.entry.nbytes - start)
            left, right = (t.file.read_bytes(t.entry.offset_bytes + start, size) for t in (a, b))
            if left != right:
                return False
        return True

    def close(self) -> None:
        """Close every file; one that is in use does not keep the others open. Closing twice is fine.

        :raises CheckpointInUseError: if a file is in use; that one stays open and may be closed later.
        """
        _close_all(self.files)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at ``path``: a ``.safetensors`` file, a ``.safetensors.index.json``, or a directory with one.

    Every header is read and proven sound, and shards must hold exactly what their index lists. Nothing stays open when
    this raises. Blocks; for worker threads.

    :raises CheckpointNotFoundError: if there is nothing at ``path``, no checkpoint in it, or a shard is missing.
    :raises CheckpointAmbiguousError: if the directory holds several checkpoints.
    :raises CheckpointOpenError: if something cannot be read or is not a regular file.
    :raises CheckpointFormatError: if a header or the index is not valid.
    :raises SourceReadError: if a header cannot be read.
    """
    chosen = os.fspath(path)
    if os.path.isdir(chosen):
        chosen = os.path.join(chosen, _choose(chosen))
    if chosen.endswith(INDEX_SUFFIX):
        return _open_sharded(chosen)
    if not chosen.endswith(FILE_SUFFIX):
        if not os.path.exists(chosen):
            raise CheckpointNotFoundError(chosen, "there is no such file or directory")
        raise CheckpointFormatError(chosen, f"a directory, a *{FILE_SUFFIX} or a *{INDEX_SUFFIX} file is expected")
    return _checkpoint(chosen, [open_checkpoint_file(chosen)])


def _choose(directory: str) -> str:
    try:
        names = os.listdir(directory)
    except OSError as failure:
        raise CheckpointOpenError(directory, f"it cannot be listed ({failure.strerror})") from failure
    return choose_checkpoint(directory, names, lambda index: set(_read_index(os.path.join(directory, index)).values()))


def _read_index(path: str) -> dict[str, str]:
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointOpenError(path, "not a regular file")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_INDEX_BYTES + 1)
    except FileNotFoundError as failure:
        raise CheckpointNotFoundError(path, "there is no such index") from failure
    except OSError as failure:
        raise CheckpointOpenError(path, f"it cannot be read ({failure.strerror})") from failure
    if len(data) > MAX_INDEX_BYTES:
        raise CheckpointFormatError(path, f"the index is larger than the limit of {MAX_INDEX_BYTES:,} bytes")
    return parse_index(path, data)


def _open_sharded(index: str) -> Checkpoint:
    weight_map = _read_index(index)
    directory = os.path.dirname(index)
    with ExitStack() as opened:
        shards: dict[str, CheckpointFile] = {}
        for name in sorted(set(weight_map.values())):
            shards[name] = opened.enter_context(_open_shard(index, os.path.join(directory, name)))
        check_shards(index, weight_map, {name: file.header.entries for name, file in shards.items()})
        opened.pop_all()
    return _checkpoint(index, shards.values())


def _open_shard(index: str, path: str) -> CheckpointFile:
    try:
        return open_checkpoint_file(path)
    except CheckpointNotFoundError as failure:
        raise CheckpointNotFoundError(path, f"this shard is missing although {index} lists it") from failure


def _checkpoint(path: str, files: Iterable[CheckpointFile]) -> Checkpoint:
    files = tuple(files)
    tensors = {name: CheckpointTensor(file, entry) for file in files for name, entry in file.header.entries.items()}
    return Checkpoint(path, files, MappingProxyType(tensors))


def _close_all(files: Iterable[CheckpointFile]) -> None:
    # an ExitStack closes them all and raises the last failure with the others as its context
    with ExitStack() as closing:
        for file in files:
            closing.callback(file.close)
