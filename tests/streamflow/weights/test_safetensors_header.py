"""Headers: everything the stock writer writes is read, everything broken is refused, nothing crashes."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from streamflow.stages.dtypes import DTYPE_BYTES
from streamflow.stages.errors import StreamflowError
from streamflow.weights.errors import CheckpointFormatError
from streamflow.weights.safetensors_dtypes import FILE_DTYPES, TORCH_TO_FILE
from streamflow.weights.safetensors_header import (
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    TensorEntry,
    header_json_bytes,
    parse_header,
)

BASIC_DTYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}


def _zeros(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.zeros((*shape, kind.itemsize), dtype=torch.uint8).view(kind).reshape(shape)


def _stock_writes(dtype: str) -> bool:
    """Whether the installed torch and safetensors know the type: old releases lack the youngest ones."""
    if not hasattr(torch, dtype):
        return False
    try:
        save({"t": _zeros(dtype, (2,))})
    except (KeyError, safetensors.SafetensorError):
        return False
    return True


STOCK_DTYPES = sorted(dtype for dtype in TORCH_TO_FILE if _stock_writes(dtype))


def parse(data: bytes, path: str = "f.safetensors") -> SafetensorsHeader:
    size = header_json_bytes(path, data[:8], len(data))
    return parse_header(path, data[8 : 8 + size], len(data))


def raw(header: dict[str, Any] | bytes, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def tensor(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_the_tables_of_dtypes_agree() -> None:
    assert set(TORCH_TO_FILE) <= set(DTYPE_BYTES)
    assert set(STOCK_DTYPES) >= BASIC_DTYPES
    for dtype in FILE_DTYPES.values():
        if dtype.torch_dtype is not None:
            assert dtype.bits * dtype.packed == 8 * DTYPE_BYTES[dtype.torch_dtype]


@pytest.mark.parametrize("dtype", STOCK_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,), (2, 0, 3)])
def test_stock_files_of_every_dtype_zero_dimensional_and_empty(dtype: str, shape: tuple[int, ...]) -> None:
    if dtype == "float4_e2m1fn_x2" and shape == ():
        shape = (5,)  # the stock writer has no zero-dimensional pairs either
    (entry,) = parse(save({"t": _zeros(dtype, shape)})).entries.values()
    count = torch.Size(shape).numel()
    assert (entry.name, entry.dtype, entry.shape, entry.nbytes) == ("t", dtype, shape, count * DTYPE_BYTES[dtype])


@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(STOCK_DTYPES), st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)),
        max_size=6,
    ),
    st.none() | st.dictionaries(st.text(), st.text(), max_size=3),
)
def test_stock_files_are_read_as_they_were_written(
    specs: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None
) -> None:
    tensors = {}
    for i, (name, (dtype, shape)) in enumerate(specs.items()):
        tensors[name] = _zeros(dtype, shape)
        tensors[name].view(torch.uint8).fill_(i + 1)
    data = save(tensors, metadata or None)  # safetensors 0.8 breaks its own header where both are empty
    header = parse(data)
    assert {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()} == specs
    assert dict(header.metadata) == (metadata or {})
    assert header.file_bytes == len(data)
    for name, entry in header.entries.items():
        stored = data[entry.offset_bytes : entry.offset_bytes + entry.nbytes]
        assert stored == bytes(tensors[name].view(torch.uint8).flatten().tolist())


def test_sub_byte_pairs_have_torchs_shape() -> None:
    data = raw({"t": tensor("F4", [3, 8], [0, 12])}, bytes(12))
    assert parse(data).entries["t"] == TensorEntry("t", "float4_e2m1fn_x2", (3, 4), len(data) - 12, 12)


REFUSED = {
    "an empty file": (b"", "the file has 0 bytes, too few"),
    "a file shorter than the length": (b"\x02\0\0", "the file has 3 bytes, too few"),
    "a header over the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "over the limit of 100,000,000"),
    "a length that looks negative": (b"\xff" * 8 + b"{}", "over the limit"),
    "a pointer to the file": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "a file that ends inside its header": (struct.pack("<Q", 50) + b"{}", "48 bytes are missing"),
    "no header": (raw(b""), "does not begin with '{'"),
    "a space before the header": (raw(b" {}"), "does not begin with '{'"),
    "a byte order mark": (raw(b"\xef\xbb\xbf{}"), "does not begin with '{'"),
    "zeros after the header": (raw(b"{}\0\0"), "not valid JSON"),
    "a tensor twice": (raw(b'{"a":1,"a":1}'), "'a' comes twice"),
    "metadata twice": (raw(b'{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' comes twice"),
    "a metadata key twice": (raw(b'{"__metadata__":{"k":"1","k":"1"}}'), "'k' comes twice"),
    "metadata of null": (raw({"__metadata__": None}), "must be an object of texts, not None"),
    "metadata with a number": (raw({"__metadata__": {"k": 1}}), r"__metadata__\['k'\] must be a text, not 1"),
    "a tensor that is no object": (raw({"a": []}), "must have exactly dtype, shape and data_offsets"),
    "a missing key": (raw({"a": {"dtype": "U8", "shape": []}}), "must have exactly"),
    "an extra key": (raw({"a": tensor() | {"stride": [1]}}, b"00"), "must have exactly"),
    "an unknown dtype": (raw({"a": tensor("F7")}, b"00"), "'a' has the unknown dtype 'F7'; known are BOOL"),
    "a dtype that is no text": (raw({"a": tensor(["U8"])}, b"00"), "unknown dtype"),
    "a shape that is no list": (raw({"a": tensor(shape=2)}, b"00"), "shape must list integers"),
    "a bool in a shape": (raw({"a": tensor(shape=[True, 2])}, b"00"), "shape must list integers"),
    "a float in a shape": (raw({"a": tensor(shape=[2.0])}, b"00"), "shape must list integers"),
    "a negative size": (raw({"a": tensor(shape=[-1, -2])}, b"00"), "shape must list integers"),
    "a huge size": (raw({"a": tensor(shape=[2**63])}, b"00"), "shape must list integers"),
    "a size of a thousand digits": (raw(b'{"a":{"dtype":"U8","shape":[%s]}}' % (b"9" * 1000)), "must have exactly"),
    "huge sizes together": (raw({"a": tensor(shape=[2**40, 2**40])}, b"00"), "too large for any tensor"),
    "huge and empty": (raw({"a": tensor(shape=[2**40, 2**40, 0], offsets=[0, 0])}), "too large for any tensor"),
    "a negative offset": (raw({"a": tensor(offsets=[-2, 0])}, b"00"), "data_offsets must list integers"),
    "a huge offset": (raw({"a": tensor(offsets=[0, 2**64])}, b"00"), "data_offsets must list integers"),
    "offsets in the wrong order": (raw({"a": tensor(offsets=[2, 0])}, b"00"), "must be .begin, end. with begin <= end"),
    "three offsets": (raw({"a": tensor(offsets=[0, 1, 2])}, b"00"), "must be .begin, end. with begin <= end"),
    "a shape larger than the range": (raw({"a": tensor("F32", [2], [0, 4])}, b"0000"), "has 8 bytes, but .* hold 4"),
    "a shape smaller than the range": (raw({"a": tensor(shape=[1])}, b"00"), "has 1 bytes, but .* hold 2"),
    "an overlap": (raw({"a": tensor(), "b": tensor(offsets=[1, 3])}, b"000"), "'b' overlaps tensor 'a' by 1 bytes"),
    "the same range twice": (raw({"a": tensor(), "b": tensor()}, b"00"), "'b' overlaps tensor 'a' by 2 bytes"),
    "an empty tensor inside another": (
        raw({"a": tensor(), "b": tensor(shape=[0], offsets=[1, 1])}, b"00"),
        "'b' overlaps tensor 'a' by 1 bytes",
    ),
    "a hole": (raw({"a": tensor(), "b": tensor(offsets=[3, 5])}, b"00000"), "hole of 1 bytes .* 'a' and tensor 'b'"),
    "a hole at the beginning": (raw({"a": tensor(offsets=[1, 3])}, b"000"), "hole of 1 bytes lies between the header"),
    "trailing bytes": (raw({"a": tensor()}, b"00000"), "3 extra bytes follow tensor 'a'"),
    "trailing bytes without a tensor": (raw({}, b"0"), "1 extra bytes follow the header"),
    "a file cut short": (raw({"a": tensor("F32", [8], [0, 32])}, b"0" * 12), "20 bytes are missing at the end"),
    "half a byte": (raw({"a": tensor("F4", [3], [0, 2])}, b"00"), "3 elements of 4 bits do not fill whole bytes"),
    "pairs across rows": (raw({"a": tensor("F4", [2, 3], [0, 3])}, b"000"), "'a': torch holds F4 in groups of 2"),
    "a type without a torch dtype": (
        raw({"a": tensor("F6_E2M3", [4], [0, 3])}, b"000"),
        "'a' has the dtype F6_E2M3, which torch cannot hold",
    ),
    "the other one": (raw({"a": tensor("F6_E3M2", [4], [0, 3])}, b"000"), "dtype F6_E3M2, which torch cannot hold"),
}


@pytest.mark.parametrize(("data", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_broken_file_is_refused_with_the_reason(data: bytes, words: str) -> None:
    with pytest.raises(CheckpointFormatError, match=words) as caught:
        parse(data, "dir/broken.safetensors")
    assert caught.value.path == "dir/broken.safetensors"
    assert str(caught.value) == f"dir/broken.safetensors: {caught.value.reason}"
    assert isinstance(caught.value, StreamflowError)
    assert isinstance(caught.value, ValueError)


def test_a_message_about_a_huge_value_is_short() -> None:
    with pytest.raises(CheckpointFormatError) as caught:
        parse(raw({"a": {"dtype": "x" * 10_000, "shape": [[[[[1] * 100]]]] * 100, "data_offsets": []}}))
    assert len(str(caught.value)) < 500


SOUND = raw(
    {
        "__metadata__": {"format": "pt"},
        "a": tensor("F32", [2, 3], [0, 24]),
        "empty": tensor("BF16", [0, 3], [24, 24]),
        "b": tensor("BF16", [5], [24, 34]),
        "scalar": tensor("I64", [], [34, 42]),
    },
    bytes(range(42)),
)


def check_never_crashes(data: bytes) -> None:
    """Refused by its own error, or taken, and then the stock reader takes it too and sees the same."""
    try:
        header = parse(data)
    except CheckpointFormatError:
        return
    stock = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    ours = {name: [TORCH_TO_FILE[entry.dtype], list(entry.shape)] for name, entry in header.entries.items()}
    assert ours == {name: [value["dtype"], list(value["shape"])] for name, value in stock.items()}
    for name, entry in header.entries.items():
        assert data[entry.offset_bytes : entry.offset_bytes + entry.nbytes] == bytes(stock[name]["data"])


def test_the_sound_file_is_taken() -> None:
    assert list(parse(SOUND).entries) == ["a", "empty", "b", "scalar"]
    check_never_crashes(SOUND)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_never_crash(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SOUND)
    for place, value in changes:
        data[place] = value
    check_never_crashes(bytes(data))


@settings(max_examples=300)
@given(st.integers(8, len(SOUND)), st.integers(0, 12), st.sampled_from([b"", b" ", b"0", b"-", b"9" * 30, b'"', b"[["]))
def test_cut_out_and_put_in_texts_never_crash(place: int, length: int, text: bytes) -> None:
    size = int.from_bytes(SOUND[:8], "little")
    changed = SOUND[8:place] + text + SOUND[place + length :]
    check_never_crashes((size + len(changed) - len(SOUND) + 8).to_bytes(8, "little", signed=False) + changed)


ODD_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**70), 1.5, "U8", "F32", "F4", "F6_E2M3"])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.text(max_size=3) | st.just("__metadata__"),
        ODD_VALUES
        | st.builds(
            tensor,
            st.sampled_from(sorted(FILE_DTYPES)) | ODD_VALUES,
            st.lists(st.integers(0, 4), max_size=3) | ODD_VALUES,
            st.lists(st.integers(0, 16), min_size=2, max_size=2).map(sorted) | ODD_VALUES,
        ),
        max_size=3,
    ),
    st.binary(max_size=40),
)
def test_odd_headers_never_crash(header: dict[str, Any], payload: bytes) -> None:
    check_never_crashes(raw(header, payload))
