"""The digests that name and prove what is stored. Pure: no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from streamflow.canonical_json import canonical_json
from streamflow.store.draft import StoredImage, StoredTensor

#: Part of every content id: another meaning of the ownership below has to give other ids.
_SCHEME = "streamflow content 1"


def content_id_of(images: Sequence[StoredImage], digests: Sequence[str]) -> str:
    """The identity of these images: the digest of who owns which bytes, and of each image's digest, in order."""
    owned = [{**image_fields(image), "sha256": digest} for image, digest in zip(images, digests, strict=True)]
    return sha256(canonical_json({"scheme": _SCHEME, "images": owned}))


def image_fields(image: StoredImage) -> dict[str, Any]:
    """An image as JSON values: who owns which of its bytes."""
    tensors = [tensor_fields(tensor) for tensor in image.tensors]
    return {"name": image.name, "role": image.role, "nbytes": image.nbytes, "tensors": tensors}


def tensor_fields(tensor: StoredTensor) -> dict[str, Any]:
    """A tensor as JSON values. One by one: entries of thousands are read within milliseconds."""
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "stride": tensor.stride,
        "offset_bytes": tensor.offset_bytes,
        "aliases": tensor.aliases,
    }


def file_digest(header: bytes, image_digests: Iterable[str]) -> str:
    """The digest of a file: over its header and the digests of the images in it, in their order."""
    digest = hashlib.sha256(header)
    for image in image_digests:
        digest.update(bytes.fromhex(image))
    return digest.hexdigest()


def sha256(data: bytes) -> str:
    """The SHA-256 of ``data``, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
