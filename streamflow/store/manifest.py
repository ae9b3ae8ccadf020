"""The manifest of a stored entry: what is in its files and how that is proved. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from streamflow.canonical_json import canonical_json
from streamflow.store.content import content_id_of, file_digest, image_fields, sha256, tensor_fields
from streamflow.store.draft import JSON, StoredImage
from streamflow.store.packing import EntryPlan, ImagePlace
from streamflow.store.stored_form import stored_form

FORMAT = "streamflow entry"
VERSION = 1
MANIFEST_NAME = "manifest.json"
#: The file whose lock is the right to use the entry.
LEASE_NAME = "lease"


@attrs.frozen
class ManifestFile:
    """One file: ``sha256`` is over its header and its images' digests, ``header_sha256`` over the header alone."""

    name: str
    nbytes: int
    header_sha256: str
    sha256: str


@attrs.frozen
class ManifestImage:
    """One image, where it lies, and the SHA-256 of its bytes, holes included as zeros."""

    image: StoredImage
    place: ImagePlace
    sha256: str


@attrs.frozen
class Manifest:
    """A whole entry. ``created_s`` counts from 1970; ``source_id`` is the source it was published from, if any."""

    content_id: str
    source_id: str | None
    created_s: int
    writer: str
    metadata: Mapping[str, JSON]
    files: tuple[ManifestFile, ...]
    images: tuple[ManifestImage, ...]

    @property
    def nbytes(self) -> int:
        """The size of all files with weights."""
        return sum(file.nbytes for file in self.files)

    @property
    def image_bytes(self) -> int:
        """The size of all images."""
        return sum(image.place.nbytes for image in self.images)


def make_manifest(
    images: Sequence[StoredImage],
    plan: EntryPlan,
    digests: Sequence[str],
    metadata: Mapping[str, JSON],
    *,
    source_id: str | None,
    created_s: int,
    writer: str,
) -> Manifest:
    """The manifest of files that were written by ``plan`` and whose images have these digests."""
    files = tuple(
        ManifestFile(
            file.name,
            file.nbytes,
            sha256(file.header),
            file_digest(file.header, (digests[index] for index in file.images)),
        )
        for file in plan.files
    )
    placed = tuple(map(ManifestImage, images, plan.places, digests))
    return Manifest(content_id_of(images, digests), source_id, created_s, writer, metadata, files, placed)


def manifest_bytes(manifest: Manifest) -> bytes:
    """What is written as ``manifest.json``: ``sha256`` in it is the digest of everything else."""
    fields = manifest_fields(manifest)
    return canonical_json({**fields, "sha256": sha256(canonical_json(fields))})


def manifest_fields(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON values, without its own digest."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "content_id": manifest.content_id,
        "source_id": manifest.source_id,
        "created_s": manifest.created_s,
        "writer": manifest.writer,
        "metadata": dict(manifest.metadata),
        "files": [attrs.asdict(file) for file in manifest.files],
        "images": [_image_fields(image) for image in manifest.images],
    }


def _image_fields(stored: ManifestImage) -> dict[str, Any]:
    image = stored.image
    return {
        **image_fields(image),
        "file": stored.place.file,
        "offset_bytes": stored.place.offset_bytes,
        "sha256": stored.sha256,
        "tensors": [
            {**tensor_fields(tensor), "permutation": stored_form(tensor).permutation} for tensor in image.tensors
        ],
    }
