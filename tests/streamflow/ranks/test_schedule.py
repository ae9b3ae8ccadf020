"""What ranks move together is compared by one digest: it has everything in it that decides a collective."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from streamflow.ranks.schedule import schedule_digest
from streamflow.stages.layout import ImageLayout, TensorSpec, plan_layout


@attrs.frozen
class Image:
    name: str
    layout: ImageLayout


def image(name: str, *numels: int, dtype: str = "uint8") -> Image:
    return Image(name, plan_layout([TensorSpec(f"w{i}", dtype, (n,), (1,)) for i, n in enumerate(numels)]))


BLOCKS = {"transformer": [image("blocks.0", 300), image("blocks.1", 5000, 7)], "encoder": [image("layers.0", 64)]}


def digest(components: Any = BLOCKS, local: Any = (), chunk_bytes: int = 4096, size: int = 2) -> str:
    return schedule_digest(components, local=local, chunk_bytes=chunk_bytes, size=size)


def test_equal_schedules_have_one_digest() -> None:
    again = {name: list(images) for name, images in BLOCKS.items()}
    assert digest() == digest(again) == digest(local=set())
    assert len(digest()) == 64
    assert digest(local=["blocks.0", "blocks.1"]) == digest(local={"blocks.1", "blocks.0"})


OTHERS: dict[str, dict[str, Any]] = {
    "the number of ranks": {"size": 4},
    "the chunks": {"chunk_bytes": 8192},
    "a block that is fetched whole": {"local": ["blocks.0"]},
    "the order of blocks": {"components": {**BLOCKS, "transformer": BLOCKS["transformer"][::-1]}},
    "the order of components": {"components": dict(reversed(BLOCKS.items()))},
    "a block more": {"components": {**BLOCKS, "encoder": [*BLOCKS["encoder"], image("layers.1", 64)]}},
    "a size": {"components": {**BLOCKS, "encoder": [image("layers.0", 640)]}},
    "a layout of equal size": {"components": {**BLOCKS, "encoder": [image("layers.0", 63)]}},
    "a dtype": {"components": {**BLOCKS, "encoder": [image("layers.0", 32, dtype="float16")]}},
    "a name": {"components": {**BLOCKS, "encoder": [image("layers.7", 64)]}},
}


def test_what_differs_in_anything_has_another_digest() -> None:
    digests = [digest(), *(digest(**other) for other in OTHERS.values())]
    assert len(set(digests)) == 1 + len(OTHERS)


def test_a_local_block_that_is_not_there_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"blocks\.9: not among .* blocks\.0, blocks\.1, layers\.0"):
        digest(local=["blocks.0", "blocks.9"])
