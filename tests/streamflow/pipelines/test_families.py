"""The kit itself: every family's small pipeline runs, is the same every time it is built, and listens to its prompt."""

from __future__ import annotations

import pytest

from tests.streamflow.kit import sha256_of
from tests.streamflow.pipelines.families.all import FAMILIES
from tests.streamflow.pipelines.families.family import Family, modules_of


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_family_generates_the_same_whenever_it_is_built(family: Family) -> None:
    pipeline = family.build()
    assert set(modules_of(pipeline)) == {*family.streamed, *family.staged}
    output = family.generate(pipeline)
    assert output.isfinite().all()
    assert output.std() > 0.01
    assert sha256_of(family.generate(family.build())) == sha256_of(output)
    assert sha256_of(family.generate(pipeline, prompt="a blue whale")) != sha256_of(output)


def test_names_are_distinct() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
