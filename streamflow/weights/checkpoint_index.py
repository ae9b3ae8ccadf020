"""Parse and validate the index of a sharded checkpoint. Pure: bytes in, a map of names out."""

from __future__ import annotations

from collections.abc import Mapping

from streamflow.weights.errors import CheckpointFormatError
from streamflow.weights.strict_json import StrictJSONError, load_object

#: No index is larger than a safetensors header may be.
MAX_INDEX_BYTES = 100_000_000
SHARD_SUFFIX = ".safetensors"
_SHOWN = 4


def parse_index(path: str, data: bytes) -> dict[str, str]:
    """The file name of every tensor's shard, each a plain name that stays inside the index's directory.

    :raises CheckpointFormatError: if the index is malformed, names no tensor, or names a file elsewhere.
    """
    try:
        weight_map = load_object(data).get("weight_map")
    except StrictJSONError as fault:
        raise CheckpointFormatError(path, f"the index is not valid JSON: {fault}") from fault
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointFormatError(path, "weight_map must be an object that names the file of each tensor")
    for tensor, shard in weight_map.items():
        if not _is_plain_shard_name(shard):
            raise CheckpointFormatError(
                path, f"tensor {tensor!r} is said to be in {shard!r}; a plain *{SHARD_SUFFIX} file name is expected"
            )
    return weight_map


def _is_plain_shard_name(name: object) -> bool:
    if not isinstance(name, str) or not name.endswith(SHARD_SUFFIX) or name == SHARD_SUFFIX:
        return False
    return not any(character in name for character in "/\\\0")


def check_shards(path: str, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, object]]) -> None:
    """Nothing, if the shards hold exactly the tensors that the index places in each (``shards``: file to tensors).

    :raises CheckpointFormatError: if a listed tensor is not in its shard, or a shard holds one that the index does not
        list or places elsewhere; so no tensor is in two shards.
    """
    missing = [f"{name!r} in {shard}" for name, shard in weight_map.items() if name not in shards[shard]]
    if missing:
        raise CheckpointFormatError(path, f"listed tensors are missing: {_some(missing)}; download the shards again")
    extra = [
        f"{name!r} in {shard} (the index says {weight_map.get(name, 'nothing of it')})"
        for shard, tensors in shards.items()
        for name in tensors
        if weight_map.get(name) != shard
    ]
    if extra:
        raise CheckpointFormatError(path, f"the shards hold tensors that the index does not list there: {_some(extra)}")


def _some(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
