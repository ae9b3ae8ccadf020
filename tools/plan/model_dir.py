"""Finds the components of a model on disk: one checkpoint, or those of a pipeline's folder. Reads headers only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from streamflow.weights.checkpoint import open_checkpoint
from streamflow.weights.checkpoint_choice import FILE_SUFFIX, INDEX_SUFFIX
from streamflow.weights.errors import CheckpointFormatError, CheckpointNotFoundError, CheckpointOpenError
from streamflow.weights.safetensors_header import TensorEntry
from streamflow.weights.strict_json import StrictJSONError, load_object

#: The file that makes a folder a pipeline's; it names the components, each in a folder of its own.
PIPELINE_INDEX = "model_index.json"
#: Endings of files that hold weights in other formats.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
EXPECTED = f"give a model's folder with *{FILE_SUFFIX} files, one such file, or a pipeline's folder"


@attrs.frozen(eq=False)
class Component:
    """A part of a model with weights: its tensors in the order of the files, and the file or index that was chosen.

    ``kind`` is the class that a pipeline names for it; None where nothing does.
    """

    name: str
    kind: str | None
    path: str
    entries: Mapping[str, TensorEntry]
    num_files: int
    file_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


@attrs.frozen
class LeftOut:
    """A component of a pipeline that cannot be planned, and why."""

    name: str
    kind: str
    reason: str


@attrs.frozen(eq=False)
class ModelDir:
    """The components at ``path``; ``left_out`` are those of a pipeline whose weights are not in safetensors files.

    ``class_name`` is the pipeline's class; None where none is named.
    """

    path: Path
    is_pipeline: bool
    components: tuple[Component, ...]
    left_out: tuple[LeftOut, ...] = ()
    class_name: str | None = None


def read_model_dir(path: Path) -> ModelDir:
    """What is at ``path``. Every header is read and proven sound; no weight is read. Blocks.

    :raises CheckpointNotFoundError: if there is nothing, or no safetensors file in it.
    :raises CheckpointAmbiguousError: if a folder holds several checkpoints.
    :raises CheckpointOpenError: if something cannot be read.
    :raises CheckpointFormatError: if a header, an index or the pipeline's own file is not valid.
    """
    if not path.exists():
        raise CheckpointNotFoundError(str(path), f"there is no such file or folder; {EXPECTED}")
    if (path / PIPELINE_INDEX).is_file():
        return _read_pipeline(path)
    if path.is_dir() and not _has_safetensors(path):
        raise CheckpointNotFoundError(str(path), _what_instead(path))
    return ModelDir(path, False, (_read_component(path, path.resolve().name, None),))


def _read_component(path: Path, name: str, kind: str | None) -> Component:
    with open_checkpoint(path) as checkpoint:
        return Component(name, kind, checkpoint.path, checkpoint.entries, len(checkpoint.files), checkpoint.file_bytes)


def _read_pipeline(path: Path) -> ModelDir:
    components: list[Component] = []
    left_out: list[LeftOut] = []
    for name, kind in _named_components(path / PIPELINE_INDEX):
        folder = path / name
        if not folder.is_dir():
            left_out.append(LeftOut(name, kind, "its folder is not there"))
        elif _has_safetensors(folder):
            components.append(_read_component(folder, name, kind))
        elif others := _other_weights(folder):
            left_out.append(LeftOut(name, kind, f"its weights are not in safetensors files but in {', '.join(others)}"))
    if not components:
        reasons = "".join(f"; {left.name}: {left.reason}" for left in left_out)
        raise CheckpointNotFoundError(str(path), f"no component of this pipeline has *{FILE_SUFFIX} files{reasons}")
    class_name = _index_fields(path / PIPELINE_INDEX).get("_class_name")
    return ModelDir(path, True, tuple(components), tuple(left_out), class_name if isinstance(class_name, str) else None)


def _index_fields(index: Path) -> dict[str, Any]:
    try:
        return load_object(index.read_bytes())
    except StrictJSONError as fault:
        raise CheckpointFormatError(str(index), f"it is not valid JSON: {fault}") from fault
    except OSError as failure:
        raise CheckpointOpenError(str(index), f"it cannot be read ({failure.strerror})") from failure


def _named_components(index: Path) -> Iterator[tuple[str, str]]:
    """Name and class of each component: entries of the form ``"name": ["library", "class"]``."""
    for name, value in _index_fields(index).items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], str):
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise CheckpointFormatError(str(index), f"the component {name!r} is no plain folder name")
            yield name, value[1]


def _has_safetensors(folder: Path) -> bool:
    return any(name.endswith((FILE_SUFFIX, INDEX_SUFFIX)) for name in _names_in(folder))


def _other_weights(folder: Path) -> list[str]:
    return [name for name in _names_in(folder) if name.endswith(OTHER_WEIGHTS)]


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as failure:
        raise CheckpointOpenError(str(folder), f"it cannot be listed ({failure.strerror})") from failure


def _what_instead(folder: Path) -> str:
    """Why nothing can be planned in a folder, and what its user may have meant."""
    if others := _other_weights(folder):
        return f"its weights are not in safetensors files but in {', '.join(others)}; save them as safetensors first"
    inner = [name for name in _names_in(folder) if (folder / name).is_dir() and _has_safetensors(folder / name)]
    if inner:
        return f"the folder holds no *{FILE_SUFFIX} file, but its folders {', '.join(inner)} do; give one of these"
    return f"the folder holds no *{FILE_SUFFIX} file; {EXPECTED}"
