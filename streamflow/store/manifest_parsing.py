"""Read a manifest and believe nothing in it that is not proved. Pure: no torch.

What can be derived is derived and compared: the digest of the manifest, the content id from the images, and from their
tensors every header, place and file size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import attrs

from streamflow.canonical_json import canonical_json
from streamflow.store.content import content_id_of, file_digest, sha256
from streamflow.store.draft import ImageRole, StoredImage, StoredTensor, TensorKind
from streamflow.store.draft_rules import check_images
from streamflow.store.errors import DraftError, UnsupportedTensorError
from streamflow.store.manifest import FORMAT, VERSION, Manifest, ManifestFile, ManifestImage
from streamflow.store.manifest_values import (
    Fields,
    ManifestError,
    an_object,
    digest,
    each,
    size,
    sizes,
    text,
    text_or_none,
    texts,
)
from streamflow.store.packing import EntryPlan, FilePlan, ImagePlace, plan_groups
from streamflow.store.stored_form import stored_form
from streamflow.weights.strict_json import StrictJSONError, load_object

Value = TypeVar("Value")

#: No manifest is larger: reading one must not fill the memory.
MAX_MANIFEST_BYTES = 256 << 20


@attrs.frozen
class ProvenManifest:
    """A manifest together with the files that it implies."""

    manifest: Manifest
    plan: EntryPlan


def parse_manifest(data: bytes, content_id: str) -> ProvenManifest:
    """The manifest of the entry ``content_id``.

    :raises ManifestError: if it is not one, is another entry's, contradicts itself, or has anything in it that a
        manifest has not.
    """
    fields = _json(data)
    if fields.pop("sha256", None) != sha256(canonical_json(fields)):
        raise ManifestError("its own digest does not fit what it says")
    manifest = _manifest(fields)
    plan = _plan(manifest)
    _compare(manifest, plan, content_id)
    return ProvenManifest(manifest, plan)


def _json(data: bytes) -> dict[str, Any]:
    try:
        return load_object(data)
    except StrictJSONError as failure:
        raise ManifestError(f"it is not valid JSON: {failure}") from failure


def _manifest(fields: dict[str, Any]) -> Manifest:
    if (fields.get("format"), fields.get("version")) != (FORMAT, VERSION):
        raise ManifestError(f"its format is {fields.get('format')!r}, version {fields.get('version')!r}")
    read = Fields(fields)
    read.take("format", text)
    read.take("version", size)
    manifest = Manifest(
        content_id=read.take("content_id", digest),
        source_id=read.take("source_id", text_or_none),
        created_s=read.take("created_s", size),
        writer=read.take("writer", text),
        metadata=read.take("metadata", an_object),
        files=read.take("files", each(_file)),
        images=read.take("images", each(_image)),
    )
    read.finish()
    return manifest


def _file(value: object) -> ManifestFile:
    read = Fields(value)
    file = ManifestFile(
        name=read.take("name", text),
        nbytes=read.take("nbytes", size),
        header_sha256=read.take("header_sha256", digest),
        sha256=read.take("sha256", digest),
    )
    read.finish()
    return file


def _image(value: object) -> ManifestImage:
    read = Fields(value)
    image = StoredImage(
        name=read.take("name", text),
        role=read.take("role", _role),
        nbytes=read.take("nbytes", size),
        tensors=read.take("tensors", each(_tensor)),
    )
    place = ImagePlace(read.take("file", size), read.take("offset_bytes", size), image.nbytes)
    placed = ManifestImage(image, place, read.take("sha256", digest))
    read.finish()
    return placed


def _tensor(value: object) -> StoredTensor:
    read = Fields(value)
    tensor = StoredTensor(
        name=read.take("name", text),
        kind=read.take("kind", _kind),
        dtype=read.take("dtype", text),
        shape=read.take("shape", sizes),
        stride=read.take("stride", sizes),
        offset_bytes=read.take("offset_bytes", size),
        aliases=read.take("aliases", texts),
    )
    permutation = read.take("permutation", sizes)
    read.finish()
    if len(tensor.shape) != len(tensor.stride):
        raise ManifestError("its shape and stride differ in length")
    if _refusals(lambda: stored_form(tensor).permutation) != permutation:
        raise ManifestError(f"the permutation {permutation} does not belong to its shape and stride")
    return tensor


def _plan(manifest: Manifest) -> EntryPlan:
    """The files that the images make when each lies in the file that the manifest says."""
    groups: list[list[int]] = [[] for _ in manifest.files]
    for index, image in enumerate(manifest.images):
        if image.place.file >= len(groups):
            raise ManifestError(f"image {index} is in file {image.place.file} of {len(groups)}")
        groups[image.place.file].append(index)
    images = [image.image for image in manifest.images]
    _refusals(lambda: check_images(images))
    return _refusals(lambda: plan_groups(images, groups))


def _compare(manifest: Manifest, plan: EntryPlan, content_id: str) -> None:
    digests = [image.sha256 for image in manifest.images]
    found = content_id_of([image.image for image in manifest.images], digests)
    if not manifest.content_id == found == content_id:
        raise ManifestError(f"it says that it is {manifest.content_id}, its images make {found}")
    for index, (image, place) in enumerate(zip(manifest.images, plan.places, strict=True)):
        if image.place != place:
            raise ManifestError(f"image {index} must be at {place}, not at {image.place}")
    for file, planned in zip(manifest.files, plan.files, strict=True):
        if file != _as_it_must_be(planned, digests):
            raise ManifestError(f"the name, size or digests of {file.name!r} do not fit the images in it")


def _as_it_must_be(file: FilePlan, digests: list[str]) -> ManifestFile:
    proof = file_digest(file.header, (digests[index] for index in file.images))
    return ManifestFile(file.name, file.nbytes, sha256(file.header), proof)


def _refusals(work: Callable[[], Value]) -> Value:
    try:
        return work()
    except (DraftError, UnsupportedTensorError) as failure:
        raise ManifestError(str(failure)) from failure


def _role(value: object) -> ImageRole:
    role: ImageRole = _one_of(value, get_args(ImageRole))
    return role


def _kind(value: object) -> TensorKind:
    kind: TensorKind = _one_of(value, get_args(TensorKind))
    return kind


def _one_of(value: object, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ManifestError(f"it must be one of {known}")
    return value
