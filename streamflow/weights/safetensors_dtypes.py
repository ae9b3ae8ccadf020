"""The element types of the safetensors format, and what torch calls them. Pure: no torch.

The format counts elements in bits: ``F4`` holds two to a byte and the ``F6`` types four to three bytes.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class FileDtype:
    """One element type of the format.

    ``torch_dtype`` is None for types that no torch tensor can hold; ``packed`` is how many elements of the file make
    one element of the torch tensor (2 for ``F4``, whose torch type holds pairs, so that the last dimension is halved).
    """

    bits: int
    torch_dtype: str | None
    packed: int = 1


FILE_DTYPES: dict[str, FileDtype] = {
    "BOOL": FileDtype(8, "bool"),
    "U8": FileDtype(8, "uint8"),
    "I8": FileDtype(8, "int8"),
    "U16": FileDtype(16, "uint16"),
    "I16": FileDtype(16, "int16"),
    "U32": FileDtype(32, "uint32"),
    "I32": FileDtype(32, "int32"),
    "U64": FileDtype(64, "uint64"),
    "I64": FileDtype(64, "int64"),
    "F4": FileDtype(4, "float4_e2m1fn_x2", packed=2),
    "F6_E2M3": FileDtype(6, None),
    "F6_E3M2": FileDtype(6, None),
    "F8_E4M3": FileDtype(8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": FileDtype(8, "float8_e4m3fnuz"),
    "F8_E5M2": FileDtype(8, "float8_e5m2"),
    "F8_E5M2FNUZ": FileDtype(8, "float8_e5m2fnuz"),
    "F8_E8M0": FileDtype(8, "float8_e8m0fnu"),
    "F16": FileDtype(16, "float16"),
    "BF16": FileDtype(16, "bfloat16"),
    "F32": FileDtype(32, "float32"),
    "F64": FileDtype(64, "float64"),
    "C64": FileDtype(64, "complex64"),
}

#: The format's name of every torch dtype that a safetensors file can hold.
TORCH_TO_FILE: dict[str, str] = {
    dtype.torch_dtype: name for name, dtype in FILE_DTYPES.items() if dtype.torch_dtype is not None
}
