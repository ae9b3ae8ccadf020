"""Drafts that contradict themselves are refused before anything is written."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from streamflow.store.draft import StoredImage, StoredTensor
from streamflow.store.draft_rules import check_images, check_metadata
from streamflow.store.errors import DraftError, StoreCode
from tests.streamflow.store.kit import model

TENSOR = StoredTensor("t", "parameter", "int16", (4,), (1,), 0)
IMAGE = StoredImage("i", "block", 256, (TENSOR,))


def test_a_sound_draft_passes() -> None:
    check_images(model().images)
    check_metadata({"a": [1, 2.5, None, True, {"b": "text"}]})


@pytest.mark.parametrize(
    ("images", "name"),
    [
        ([IMAGE, attrs.evolve(IMAGE, tensors=())], "i"),
        ([IMAGE, attrs.evolve(IMAGE, name="j")], "t"),
        ([attrs.evolve(IMAGE, tensors=(attrs.evolve(TENSOR, aliases=("u", "t")),))], "t"),
    ],
    ids=["image", "tensor", "alias"],
)
def test_a_name_for_two_things_is_ambiguous(images: list[StoredImage], name: str) -> None:
    with pytest.raises(DraftError, match="comes twice") as caught:
        check_images(images)
    assert (caught.value.name, caught.value.code) == (name, StoreCode.AMBIGUOUS_OWNERSHIP)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "weight"}, "kind must be one of"),
        ({"dtype": "float3"}, "'float3' is unknown"),
        ({"stride": ()}, "differ in length"),
        ({"stride": (-1,)}, "from 0 to"),
        ({"shape": (2**63,)}, "from 0 to"),
        ({"offset_bytes": 1}, "not aligned"),
        ({"name": ""}, "no name"),
        ({"name": "__streamflow_pad__.0"}, "the file format uses it"),
        ({"aliases": ("__metadata__",)}, "the file format uses it"),
        ({"name": "\ud800"}, "not valid text"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DraftError, match=words):
        check_images([attrs.evolve(IMAGE, tensors=(attrs.evolve(TENSOR, **change),))])


@pytest.mark.parametrize(("change", "words"), [({"role": "other"}, "role"), ({"nbytes": -1}, "its size")])
def test_an_image_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DraftError, match=words):
        check_images([attrs.evolve(IMAGE, **change)])


def test_a_draft_of_nothing_is_refused() -> None:
    with pytest.raises(DraftError, match="no image"):
        check_images([])


@pytest.mark.parametrize("value", [math.nan, math.inf, (1, 2), object(), {1: 2}, 10**30, "\ud800"])
def test_metadata_that_would_come_back_different_are_refused(value: Any) -> None:
    with pytest.raises(DraftError, match="metadata"):
        check_metadata({"key": value})
