"""Parse and fully validate a safetensors header. Pure: bytes and a file size in, entries out; no torch, no file.

A header that passes leaves nothing for a reader to trip over: every byte of the file belongs to the header or to
exactly one tensor, and every tensor's shape and type account for exactly its bytes.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from streamflow.weights.errors import CheckpointFormatError
from streamflow.weights.safetensors_dtypes import FILE_DTYPES, FileDtype
from streamflow.weights.strict_json import StrictJSONError, load_object

#: The file begins with the size of the JSON that follows, as a little-endian integer of this many bytes.
LENGTH_BYTES = 8
#: The format's own limit on that size.
MAX_HEADER_BYTES = 100_000_000
_MAX_SIZE = 2**63 - 1
_REPR = reprlib.Repr()
_TENSOR_KEYS = frozenset({"dtype", "shape", "data_offsets"})


@attrs.frozen
class TensorEntry:
    """One tensor of a file, row-major, as torch sees it.

    ``dtype`` is torch's name without the prefix; ``shape`` is in elements of that type; ``offset_bytes`` counts from
    the beginning of the file and need not be aligned.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


@attrs.frozen
class SafetensorsHeader:
    """A validated header: entries by name in file order, the free-form metadata, and the size of the whole file."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    file_bytes: int


class _Fault(ValueError):
    """A rule that the header breaks; becomes a CheckpointFormatError with the file's path."""


def header_json_bytes(path: str, prefix: bytes, file_bytes: int) -> int:
    """The size of the JSON that follows the length field; ``prefix`` is the file's first 8 bytes (fewer if it ends).

    :raises CheckpointFormatError: if the file is too short to hold it or the size is over the format's limit.
    """
    try:
        return _json_bytes(prefix, file_bytes)
    except _Fault as fault:
        raise CheckpointFormatError(path, str(fault)) from None


def parse_header(path: str, header: bytes, file_bytes: int) -> SafetensorsHeader:
    """The entries that ``header`` (the JSON after the length field) describes, proven to fit a file of ``file_bytes``.

    :raises CheckpointFormatError: if anything is malformed, disagrees with itself or with the size of the file, or is
        of a type that torch cannot hold.
    """
    try:
        return _parse(header, file_bytes)
    except StrictJSONError as fault:
        raise CheckpointFormatError(path, f"the header is not valid JSON: {fault}") from fault
    except _Fault as fault:
        raise CheckpointFormatError(path, str(fault)) from None


def _json_bytes(prefix: bytes, file_bytes: int) -> int:
    if file_bytes < LENGTH_BYTES:
        raise _Fault(f"the file has {file_bytes} bytes, too few for a safetensors header; copy or download it again")
    if prefix == b"version ":
        raise _Fault("this is a Git LFS pointer, not the file it stands for; fetch the file with `git lfs pull`")
    size = int.from_bytes(prefix, "little")
    if size > MAX_HEADER_BYTES:
        raise _Fault(f"the header claims {size:,} bytes, over the limit of {MAX_HEADER_BYTES:,}; is it safetensors?")
    missing = LENGTH_BYTES + size - file_bytes
    if missing > 0:
        raise _Fault(f"the file ends inside its header: {missing:,} bytes are missing; copy or download it again")
    return size


def _parse(header: bytes, file_bytes: int) -> SafetensorsHeader:
    if not header.startswith(b"{"):
        raise _Fault("the header does not begin with '{'; is it a safetensors file?")
    fields = load_object(header)
    metadata = _metadata(fields.pop("__metadata__", {}))
    data_start = LENGTH_BYTES + len(header)
    entries = [_entry(name, value, data_start) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.offset_bytes, entry.nbytes))
    _check_coverage(entries, data_start, file_bytes)
    by_name = {entry.name: entry for entry in entries}
    return SafetensorsHeader(MappingProxyType(by_name), MappingProxyType(metadata), file_bytes)


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _Fault(f"__metadata__ must be an object of texts, not {_show(value)}")
    for key, text in value.items():
        if not isinstance(text, str):
            raise _Fault(f"__metadata__[{key!r}] must be a text, not {_show(text)}")
    return value


def _entry(name: str, value: object, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != _TENSOR_KEYS:
        raise _Fault(f"tensor {name!r} must have exactly dtype, shape and data_offsets, not {_show(value)}")
    kind = _file_dtype(name, value["dtype"])
    shape = _sizes(name, "shape", value["shape"])
    begin, end = _range(name, value["data_offsets"])
    nbytes = _tensor_bytes(name, kind, shape)
    if nbytes != end - begin:
        raise _Fault(
            f"tensor {name!r} of {value['dtype']} {_show(list(shape))} has {nbytes:,} bytes, "
            f"but its data_offsets [{begin}, {end}] hold {end - begin:,}"
        )
    dtype, shape = _as_torch(name, value["dtype"], kind, shape)
    return TensorEntry(name, dtype, shape, data_start + begin, nbytes)


def _file_dtype(name: str, value: object) -> FileDtype:
    if not isinstance(value, str) or value not in FILE_DTYPES:
        raise _Fault(f"tensor {name!r} has the unknown dtype {_show(value)}; known are {', '.join(FILE_DTYPES)}")
    return FILE_DTYPES[value]


def _sizes(name: str, key: str, value: object) -> tuple[int, ...]:
    """``value`` as sizes. bool is an int to Python and is refused by the exact type."""
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value):
        raise _Fault(f"tensor {name!r}: {key} must list integers from 0 to 2**63 - 1, not {_show(value)}")
    return tuple(value)


def _range(name: str, value: object) -> tuple[int, int]:
    offsets = _sizes(name, "data_offsets", value)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Fault(
            f"tensor {name!r}: data_offsets must be [begin, end] with begin <= end, not {_show(list(offsets))}"
        )
    return offsets[0], offsets[1]


def _tensor_bytes(name: str, kind: FileDtype, shape: tuple[int, ...]) -> int:
    # empty dimensions count as one here: strides are computed that way, and must fit 64 bits too
    if math.prod(max(size, 1) for size in shape) > _MAX_SIZE:
        raise _Fault(f"tensor {name!r}: the shape {_show(list(shape))} is too large for any tensor")
    bits = math.prod(shape) * kind.bits
    if bits % 8:
        raise _Fault(f"tensor {name!r}: {math.prod(shape)} elements of {kind.bits} bits do not fill whole bytes")
    return bits // 8


def _as_torch(name: str, file_dtype: str, kind: FileDtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    if kind.torch_dtype is None:
        raise _Fault(f"tensor {name!r} has the dtype {file_dtype}, which torch cannot hold; convert the checkpoint")
    if kind.packed == 1:
        return kind.torch_dtype, shape
    if not shape or shape[-1] % kind.packed:
        raise _Fault(
            f"tensor {name!r}: torch holds {file_dtype} in groups of {kind.packed} along the last dimension, "
            f"which the shape {_show(list(shape))} does not allow; convert the checkpoint"
        )
    return kind.torch_dtype, (*shape[:-1], shape[-1] // kind.packed)


def _check_coverage(entries: Iterable[TensorEntry], data_start: int, file_bytes: int) -> None:
    """Ranges (sorted) must follow each other from the end of the header to the end of the file."""
    end, previous = data_start, "the header"
    for entry in entries:
        gap = entry.offset_bytes - end
        if gap < 0:
            raise _Fault(f"tensor {entry.name!r} overlaps {previous} by {-gap:,} bytes")
        if gap > 0:
            raise _Fault(f"a hole of {gap:,} bytes lies between {previous} and tensor {entry.name!r}")
        end, previous = entry.offset_bytes + entry.nbytes, f"tensor {entry.name!r}"
    if end > file_bytes:
        raise _Fault(
            f"the file has {file_bytes:,} bytes where its header describes {end:,}: {end - file_bytes:,} bytes are "
            "missing at the end; copy or download it again"
        )
    if end < file_bytes:
        raise _Fault(f"{file_bytes - end:,} extra bytes follow {previous} at the end of the file")


def _show(value: object) -> str:
    """``value`` for a message, cut in length and depth: it comes from a file that nobody has checked."""
    return _REPR.repr(value)
