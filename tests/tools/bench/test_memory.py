"""``streamflow bench memory``: what its reading has to be for the promise to hold."""

from __future__ import annotations

import mmap
from typing import Any

import attrs
import pytest

from streamflow.tools.bench.memory import MemoryReading

PAGES = 100
ON_A_DEVICE = MemoryReading(
    device="cuda",
    num_processes=2,
    artifact_bytes=1000,
    shared_bytes=1000,
    limit_bytes=1050,
    private_bytes=0,
    mapped_bytes=2000,
    left_bytes=0,
    registered_bytes=PAGES * mmap.PAGESIZE,
    pinned_pages=(7, 7 + PAGES, 7),
    outcomes=("published", "local_hit"),
    transfers=("direct", "direct"),
    outputs_equal=True,
)
ON_THE_HOST = attrs.evolve(ON_A_DEVICE, device="cpu", registered_bytes=0, pinned_pages=None)


@pytest.mark.parametrize("sound", [ON_A_DEVICE, ON_THE_HOST])
@pytest.mark.parametrize(
    "fault", [{"shared_bytes": 1051}, {"private_bytes": 1}, {"left_bytes": 4096}, {"outputs_equal": False}], ids=str
)
def test_each_part_of_the_promise_counts(sound: MemoryReading, fault: dict[str, Any]) -> None:
    assert sound.is_met
    assert not attrs.evolve(sound, **fault).is_met


@pytest.mark.parametrize("pinned", [(7, 7 + PAGES, 8), (7, 6 + PAGES, 7), None])
def test_what_was_registered_is_pinned_and_given_back_to_the_page(pinned: tuple[int, int, int] | None) -> None:
    assert not attrs.evolve(ON_A_DEVICE, pinned_pages=pinned).is_met
