"""What has to hold for a draft before anything is written. Pure: no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from streamflow.stages.dtypes import DTYPE_BYTES
from streamflow.store.codes import StoreCode
from streamflow.store.draft import JSON, ImageRole, StoredImage, StoredTensor, TensorKind
from streamflow.store.errors import DraftError
from streamflow.store.packing import PAD_PREFIX
from streamflow.weights.strict_json import StrictJSONError, load_object

_LIMIT = 2**63


def check_images(images: Sequence[StoredImage]) -> None:
    """Nothing, if the images are consistent in themselves and no name stands for two things.

    :raises DraftError: if they are not; its code is ``ambiguous_ownership`` where a name comes twice.
    """
    if not images:
        raise DraftError("the draft", "there is no image in it")
    _check_distinct("image", (image.name for image in images))
    for image in images:
        _check_image(image)
    _check_distinct("tensor", _tensor_names(images))


def check_metadata(metadata: Mapping[str, JSON]) -> None:
    """Nothing, if the metadata would be read from a file as they are.

    :raises DraftError: if they would not: tuples, NaN, integers over 64 bits, keys that are no texts ...
    """
    try:
        kept = load_object(json.dumps(dict(metadata), allow_nan=False).encode("utf-8", "strict"))
    except (TypeError, ValueError, StrictJSONError, RecursionError) as failure:
        raise DraftError("metadata", f"they cannot be written as JSON ({failure})") from failure
    if kept != dict(metadata):
        raise DraftError("metadata", "they would be read back as other values; use JSON's own types")


def _tensor_names(images: Sequence[StoredImage]) -> Iterator[str]:
    for image in images:
        for tensor in image.tensors:
            yield tensor.name
            yield from tensor.aliases


def _check_distinct(what: str, names: Iterator[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DraftError(name, f"this {what} comes twice", StoreCode.AMBIGUOUS_OWNERSHIP)
        seen.add(name)


def _check_image(image: StoredImage) -> None:
    _check_name("image", image.name)
    if image.role not in get_args(ImageRole):
        raise DraftError(image.name, f"its role must be one of {get_args(ImageRole)}, not {image.role!r}")
    if not 0 <= image.nbytes < _LIMIT:
        raise DraftError(image.name, f"its size must be from 0 to 2**63 - 1 bytes, not {image.nbytes}")
    for tensor in image.tensors:
        _check_tensor(tensor)


def _check_tensor(tensor: StoredTensor) -> None:
    for name in (tensor.name, *tensor.aliases):
        _check_name("tensor", name)
    if tensor.kind not in get_args(TensorKind):
        raise DraftError(tensor.name, f"its kind must be one of {get_args(TensorKind)}, not {tensor.kind!r}")
    if tensor.dtype not in DTYPE_BYTES:
        raise DraftError(tensor.name, f"the dtype {tensor.dtype!r} is unknown", StoreCode.UNSUPPORTED_TENSOR)
    if len(tensor.shape) != len(tensor.stride):
        raise DraftError(tensor.name, f"its shape {tensor.shape} and stride {tensor.stride} differ in length")
    if not all(0 <= number < _LIMIT for number in (*tensor.shape, *tensor.stride, tensor.offset_bytes)):
        raise DraftError(tensor.name, "its shape, stride and offset must be from 0 to 2**63 - 1")
    if tensor.offset_bytes % DTYPE_BYTES[tensor.dtype]:
        raise DraftError(tensor.name, f"its offset {tensor.offset_bytes} is not aligned to its elements")


def _check_name(what: str, name: str) -> None:
    if not name and what == "tensor":
        raise DraftError("the draft", "a tensor has no name")
    if name.startswith(PAD_PREFIX) or name == "__metadata__":
        raise DraftError(name, f"no {what} may have this name: the file format uses it")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise DraftError(repr(name), "the name is not valid text") from failure
