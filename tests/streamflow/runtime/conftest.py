"""What tests of the runtime share."""

from __future__ import annotations

import pytest

from tests.streamflow.runtime.kit import Stops


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Stops:
    """Tells when a request is told to stop."""
    return Stops(monkeypatch)
