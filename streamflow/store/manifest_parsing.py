"""Read a manifest and believe nothing in it that is not proved. Pure: no torch.

What can be derived is derived and compared: the digest of the manifest, the content id from the images, and from their
tensors every header, place and file size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import attrs

from streamflow.store.content import canonical_json, content_id_of, file_digest, sha256
from streamflow.store.draft import ImageRole, StoredImage, StoredTensor, TensorKind
from streamflow.store.draft_rules import check_images
from streamflow.store.errors import DraftError, UnsupportedTensorError
from streamflow.store.manifest import FORMAT, VERSION, Manifest, ManifestFile, ManifestImage
from streamflow.store.packing import EntryPlan, FilePlan, ImagePlace, plan_groups
from streamflow.store.stored_form import stored_form
from streamflow.weights.strict_json import StrictJSONError, load_object

Value = TypeVar("Value")

#: No manifest is larger: reading one must not fill the memory.
MAX_MANIFEST_BYTES = 256 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMIT = 2**63


class ManifestError(ValueError):
    """The bytes are not the manifest of an entry; the message says why."""


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
    if _text(fields.pop("sha256", None), "sha256") != sha256(canonical_json(fields)):
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
    read = _Fields(fields, "the manifest")
    read.take("format", _text)
    read.take("version", _size)
    manifest = Manifest(
        content_id=read.take("content_id", _digest),
        source_id=read.take("source_id", lambda value, what: None if value is None else _text(value, what)),
        created_s=read.take("created_s", _size),
        writer=read.take("writer", _text),
        metadata=read.take("metadata", _object),
        files=read.take("files", _each(_file)),
        images=read.take("images", _each(_image)),
    )
    read.finish()
    return manifest


def _file(value: object, what: str) -> ManifestFile:
    read = _Fields(value, what)
    file = ManifestFile(
        name=read.take("name", _text),
        nbytes=read.take("nbytes", _size),
        header_sha256=read.take("header_sha256", _digest),
        sha256=read.take("sha256", _digest),
    )
    read.finish()
    return file


def _image(value: object, what: str) -> ManifestImage:
    read = _Fields(value, what)
    image = StoredImage(
        name=read.take("name", _text),
        role=read.take("role", _role),
        nbytes=read.take("nbytes", _size),
        tensors=read.take("tensors", _each(_tensor)),
    )
    place = ImagePlace(read.take("file", _size), read.take("offset_bytes", _size), image.nbytes)
    placed = ManifestImage(image, place, read.take("sha256", _digest))
    read.finish()
    return placed


def _tensor(value: object, what: str) -> StoredTensor:
    read = _Fields(value, what)
    tensor = StoredTensor(
        name=read.take("name", _text),
        kind=read.take("kind", _kind),
        dtype=read.take("dtype", _text),
        shape=read.take("shape", _each(_size)),
        stride=read.take("stride", _each(_size)),
        offset_bytes=read.take("offset_bytes", _size),
        aliases=read.take("aliases", _each(_text)),
    )
    permutation = read.take("permutation", _each(_size))
    read.finish()
    if len(tensor.shape) != len(tensor.stride) or _refusals(lambda: stored_form(tensor).permutation) != permutation:
        raise ManifestError(f"{what}: the permutation {permutation} does not belong to its shape and stride")
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


class _Fields:
    """The fields of an object, each to be taken once."""

    def __init__(self, value: object, what: str) -> None:
        self._left = dict(_object(value, what))
        self._what = what

    def take(self, name: str, read: Callable[[object, str], Value]) -> Value:
        if name not in self._left:
            raise ManifestError(f"{self._what} has no {name}")
        return read(self._left.pop(name), f"{name} of {self._what}")

    def finish(self) -> None:
        if self._left:
            raise ManifestError(f"{self._what} has the unknown fields {sorted(self._left)}")


def _each(read: Callable[[object, str], Value]) -> Callable[[object, str], tuple[Value, ...]]:
    def read_all(value: object, what: str) -> tuple[Value, ...]:
        if not isinstance(value, list):
            raise ManifestError(f"{what} must be a list")
        return tuple(read(item, f"{what}, number {index}") for index, item in enumerate(value))

    return read_all


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{what} must be an object")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ManifestError(f"{what} must be a text")
    return value


def _size(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:  # bool is an int to Python
        raise ManifestError(f"{what} must be an integer from 0 to 2**63 - 1")
    return value


def _digest(value: object, what: str) -> str:
    text = _text(value, what)
    if not _DIGEST.fullmatch(text):
        raise ManifestError(f"{what} must be 64 hexadecimal digits")
    return text


def _role(value: object, what: str) -> ImageRole:
    role: ImageRole = _one_of(value, what, get_args(ImageRole))
    return role


def _kind(value: object, what: str) -> TensorKind:
    kind: TensorKind = _one_of(value, what, get_args(TensorKind))
    return kind


def _one_of(value: object, what: str, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ManifestError(f"{what} must be one of {known}")
    return value
