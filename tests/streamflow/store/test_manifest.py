"""A manifest comes back as it was written, and not one thing in it can be changed unseen."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from streamflow.canonical_json import canonical_json
from streamflow.store.content import sha256
from streamflow.store.manifest import make_manifest, manifest_bytes, manifest_fields
from streamflow.store.manifest_parsing import parse_manifest
from streamflow.store.manifest_values import ManifestError
from streamflow.store.packing import plan_entry
from tests.streamflow.store.kit import model

MODEL = model()
PLAN = plan_entry(MODEL.images, 100_000)
MANIFEST = make_manifest(
    MODEL.images,
    PLAN,
    [sha256(data) for data in MODEL.data],
    {"abi": "1", "nested": [{"a": None}]},
    source_id="source",
    created_s=5,
    writer="test",
)
FIELDS: dict[str, Any] = json.loads(canonical_json(manifest_fields(MANIFEST)))
Path = tuple[str | int, ...]


def signed(fields: dict[str, Any]) -> bytes:
    """What somebody would write who knows how the digest is made."""
    return canonical_json({**fields, "sha256": sha256(canonical_json(fields))})


def every_place(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from every_place(item, (*path, key))


def changed(path: Path, change: Any) -> dict[str, Any]:
    fields = copy.deepcopy(FIELDS)
    holder: Any = fields
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return fields


FREE = ("metadata", "source_id", "created_s", "writer")  # said, not proved
PROVED = [path for path in every_place(FIELDS) if path[0] not in FREE]


def test_a_manifest_comes_back() -> None:
    assert len(PLAN.files) > 1
    proven = parse_manifest(manifest_bytes(MANIFEST), MANIFEST.content_id)
    assert (proven.manifest, proven.plan) == (MANIFEST, PLAN)


@pytest.mark.parametrize("path", PROVED, ids=str)
def test_no_value_can_be_changed_even_with_a_new_digest(path: Path) -> None:
    def other(holder: Any, key: Any) -> None:
        value = holder[key]
        holder[key] = value + 1 if isinstance(value, int) else "0" * 64 if isinstance(value, str) else [*value, 7]

    with pytest.raises(ManifestError):
        parse_manifest(signed(changed(path, other)), MANIFEST.content_id)


@pytest.mark.parametrize("path", list(every_place(FIELDS)), ids=str)
def test_nothing_can_be_left_out(path: Path) -> None:
    if path[0] == "metadata" and len(path) > 1:
        path = ("metadata",)
    with pytest.raises(ManifestError):
        parse_manifest(signed(changed(path, lambda holder, key: holder.pop(key))), MANIFEST.content_id)


@pytest.mark.parametrize("path", [(), ("files", 0), ("images", 0), ("images", 0, "tensors", 0)], ids=str)
def test_nothing_can_be_added(path: Path) -> None:
    with pytest.raises(ManifestError, match="unknown fields"):
        parse_manifest(
            signed(changed((*path, "more"), lambda holder, key: holder.update({key: 1}))), MANIFEST.content_id
        )


@pytest.mark.parametrize("path", PROVED[::5], ids=str)
def test_values_of_other_kinds_are_refused(path: Path) -> None:
    for value in (None, True, -1, 1.5, "x", [], {}, 2**63):
        fields = changed(path, lambda holder, key, value=value: holder.__setitem__(key, value))
        if canonical_json(fields) != canonical_json(FIELDS):  # some are what they were
            with pytest.raises(ManifestError):
                parse_manifest(signed(fields), MANIFEST.content_id)


@pytest.mark.parametrize("name", ["../weights-00001.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_a_file_name_that_leads_elsewhere_is_refused(name: str) -> None:
    fields = changed(("files", 0, "name"), lambda holder, key: holder.__setitem__(key, name))
    with pytest.raises(ManifestError, match="do not fit"):
        parse_manifest(signed(fields), MANIFEST.content_id)


def test_no_bit_can_flip() -> None:
    sound = manifest_bytes(MANIFEST)
    for bit in range(0, 8 * len(sound), 53):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ManifestError):
            parse_manifest(bytes(data), MANIFEST.content_id)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"sha256": 1}', b'{"a":1e999}', b"\xff", b'{"a":1,"a":1}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(data, MANIFEST.content_id)


def test_another_entrys_manifest_is_refused() -> None:
    with pytest.raises(ManifestError, match="it says that it is"):
        parse_manifest(manifest_bytes(MANIFEST), "0" * 64)


def test_another_version_is_refused_by_its_name() -> None:
    with pytest.raises(ManifestError, match="version 2"):
        parse_manifest(signed({**FIELDS, "version": 2}), MANIFEST.content_id)
