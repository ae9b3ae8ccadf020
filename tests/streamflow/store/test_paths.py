"""Only plain names become paths."""

from __future__ import annotations

import pytest

from streamflow.store.errors import InvalidIdentityError
from streamflow.store.paths import StorePaths, generation_of, numbered

PATHS = StorePaths("/store")
CONTENT = "0123456789abcdef" * 4


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "@sources", ".hidden", "a\0", "a\n", "x" * 201, "ä"])
def test_an_identity_that_is_no_plain_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidIdentityError):
        PATHS.source(name)
    with pytest.raises(InvalidIdentityError):
        PATHS.publication_lock(name)


@pytest.mark.parametrize("name", ["", "..", CONTENT[1:], CONTENT.upper(), CONTENT + "\n", "g" * 64])
def test_a_content_id_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidIdentityError):
        PATHS.generation(name, 1)


@pytest.mark.parametrize(("name", "number"), [("g1", 1), ("g12", 12), ("g0", None), ("g01", None), ("g", None)])
def test_generations_are_numbered_from_one(name: str, number: int | None) -> None:
    assert generation_of(name) == number


def test_names_of_what_is_out_of_use_are_read_back() -> None:
    for path in (PATHS.denied(CONTENT, 3), PATHS.quarantined(CONTENT, 3, "ab12")):
        assert numbered(path.rsplit("/", 1)[1]) == (CONTENT, 3)
    assert numbered("something") is None
