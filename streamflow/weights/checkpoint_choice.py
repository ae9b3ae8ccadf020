"""Which checkpoint of a directory is meant. Pure: file names in, one of them out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from streamflow.weights.errors import CheckpointAmbiguousError, CheckpointNotFoundError

#: What ``save_pretrained`` of the common libraries calls a model's only file.
SINGLE_FILE_NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
INDEX_SUFFIX = ".safetensors.index.json"
FILE_SUFFIX = ".safetensors"


def choose_checkpoint(path: str, names: Sequence[str], shards_of: Callable[[str], Collection[str]]) -> str:
    """The name of the index or the single file to open.

    In order: the one index or well-known single file; else the only file there is. Other files beside an index (say, of
    another precision) are left alone; a well-known single file beside an index that does not list it is a second
    checkpoint. ``shards_of`` reads an index and says which files it lists.

    :raises CheckpointNotFoundError: if there is none.
    :raises CheckpointAmbiguousError: if there are several.
    """
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    listed = {shard for index in indexes for shard in shards_of(index)}
    singles = [name for name in SINGLE_FILE_NAMES if name in names and name not in listed]
    files = sorted(name for name in names if name.endswith(FILE_SUFFIX))
    candidates = indexes + singles or files
    if not candidates:
        raise CheckpointNotFoundError(path, _nothing_found(names))
    if len(candidates) > 1:
        raise CheckpointAmbiguousError(path, tuple(candidates))
    return candidates[0]


def _nothing_found(names: Collection[str]) -> str:
    if "model_index.json" in names:
        return "this is a pipeline's directory; give the folder of one of its components, for example its transformer"
    return f"the directory holds no *{FILE_SUFFIX} file"
