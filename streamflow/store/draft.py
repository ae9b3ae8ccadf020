"""What is to be published: block images, the tensors in them, and how to read their bytes. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, Union

import attrs

JSON: TypeAlias = Union[bool, int, float, str, list["JSON"], dict[str, "JSON"], None]  # noqa: UP007 - names itself
TensorKind = Literal["parameter", "buffer"]
ImageRole = Literal["block", "fixed"]

#: ``read(image, target, start)`` fills ``target`` with the bytes of that image from ``start`` on, holes as zeros. It
#: blocks, and is called by several threads at once.
ReadImage: TypeAlias = Callable[[int, memoryview, int], None]


@attrs.frozen
class StoredTensor:
    """One tensor of an image.

    Attributes:
        name: its name in the model, distinct in the whole draft.
        kind: what the model holds it as.
        dtype: torch's name without the prefix.
        shape: in elements.
        stride: in elements, as the module has it.
        offset_bytes: where it begins in its image.
        aliases: the other names under which the model holds the same tensor.
    """

    name: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    aliases: tuple[str, ...] = ()


@attrs.frozen
class StoredImage:
    """One image: a block's (``name`` is the block's path), or one of tensors that are not streamed (``fixed``)."""

    name: str
    role: ImageRole
    nbytes: int
    tensors: tuple[StoredTensor, ...]


@attrs.frozen
class Draft:
    """Everything a publication needs. ``metadata`` is kept in the manifest as it is and is no part of the content."""

    images: tuple[StoredImage, ...]
    read: ReadImage
    metadata: Mapping[str, JSON]
