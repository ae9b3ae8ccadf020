"""What every test of ranks in one process gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamflow.ranks import shared_images
from streamflow.stages.registration.probe import Verdicts
from streamflow.weights import registering
from tests.streamflow.ranks.kit import copies_left


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small parts, so that every rank and thread gets some; and once the models are gone, so is the copy."""
    monkeypatch.setattr(shared_images, "PART_BYTES", 1000)
    monkeypatch.setattr(registering, "VERDICTS", Verdicts())
    yield
    assert copies_left() == []
